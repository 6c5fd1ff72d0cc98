"""The demo runs to its end and writes what it says, on a small system."""

import json

import torch

from examples import demo
from fastlayers import load_converted
from models.topomad import load_paper_checkpoint


def test_demo_converts_verifies_times_and_writes_everything(tmp_path, capsys):
    assert demo.main(["--quick", "--nodes", "6", "--compile-limit", "0", "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "4 rewrites, 24 of 24 Linears; as accurate as the original" in table
    assert "deal_list, model.py:" in table and "not-nn-linear" in table
    assert "whole model, training step" in table and "under torch.compile" in table

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["report"]["passed"] is True
    into = [rewrite["into"] for rewrite in report["rewrites"]]
    assert into == ["mu", "logvar", "hidden2output", "hidden2output_logvar"]
    assert all(t["before_ms"] > 0 and t["after_ms"] > 0 for t in report["times"]["layers"])
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")

    model = load_paper_checkpoint(tmp_path / "trained.pt")
    inputs = (torch.randn(2, 3, 6, model.in_features), torch.tensor([[0, 1], [1, 2]]))
    loaded = load_converted(model, inputs, tmp_path / "converted.safetensors")
    back = loaded.restore_state_dict(loaded.model.state_dict())
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())
