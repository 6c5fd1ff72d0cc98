"""The authors' checkpoints, converted: what is rewritten, what is left; weights and numbers survive."""

import copy
import pickle

import pytest
import torch

from fastlayers import LinearList, convert_model
from models.topomad import load_paper_checkpoint
from tests.shared_data import shared_path

KINDS = {"gcn": (40, 4), "gat": (40, 4), "lin": (10, 1)}


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    folder = shared_path(f"data/topomad_checkpoints/{request.param}")
    model = load_paper_checkpoint(folder / "checkpoint.pt").eval()
    expected = torch.load(folder / "expected.pt", weights_only=True)
    inputs = (expected["windows"].float(), expected["edge_index"])
    return request.param, model, inputs, convert_model(model, inputs)


def test_one_linear_per_node_becomes_one_layer_per_list(case):
    kind, _, _, conversion = case
    linears, layers = KINDS[kind]
    assert len(conversion.rewrites) == layers
    assert sum(len(r.replaces) for r in conversion.rewrites) == linears
    assert all(isinstance(conversion.model.get_submodule(r.into), LinearList) for r in conversion.rewrites)
    assert all(r.call_site.startswith("deal_list, model.py:") for r in conversion.rewrites)
    assert {s.code for s in conversion.skips} == {"single" if kind == "lin" else "not-nn-linear"}
    assert all(s.reason and s.hint for s in conversion.skips)
    assert conversion.report.passed


def test_other_batch_sizes_and_windows_take_the_fast_path(case):
    _, model, (windows, edges), conversion = case
    converted = copy.deepcopy(conversion.model).double()
    calls = []
    for rewrite in conversion.rewrites:
        layer = converted.get_submodule(rewrite.into)
        layer.register_forward_hook(lambda *_: calls.append(1))
    for batch in (windows[:3, :7], windows[:1, :2]):
        calls.clear()
        batch = batch.double()
        torch.manual_seed(0)
        expected = copy.deepcopy(model).double()(batch, edges)
        torch.manual_seed(0)
        result = converted(batch, edges)
        assert len(calls) >= len(conversion.rewrites)
        for new, old in zip(result, expected, strict=True):
            torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)


def test_state_dicts_go_there_and_back_bit_for_bit(case):
    _, model, _, conversion = case
    old = model.state_dict()
    new = conversion.convert_state_dict(old)
    assert list(new) == list(conversion.model.state_dict())
    back = conversion.restore_state_dict(new)
    assert list(back) == list(old)
    assert all(torch.equal(back[name], tensor) for name, tensor in old.items())

    changed = {name: tensor + 1 for name, tensor in old.items()}
    loaded = copy.deepcopy(conversion.model)
    loaded.load_state_dict(changed)
    again = conversion.restore_state_dict(loaded.state_dict())
    assert all(torch.equal(again[name], tensor) for name, tensor in changed.items())


def test_copies_pickles_and_reverted_models_compute_the_same(case):
    _, model, inputs, conversion = case
    torch.manual_seed(0)
    expected = conversion.model(*inputs)
    for twin in (copy.deepcopy(conversion.model), pickle.loads(pickle.dumps(conversion.model))):
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for a, b in zip(twin(*inputs), expected, strict=True))
    reverted = conversion.revert()
    assert repr(reverted) == repr(model)
    torch.manual_seed(0)
    original = model(*inputs)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(reverted(*inputs), original, strict=True))


@pytest.mark.slow
def test_ten_thousand_linears_convert_and_verify():
    class Nodes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linears = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(10_000))

        def forward(self, x):
            return torch.stack([linear(x[:, n]) for n, linear in enumerate(self.linears)], dim=1)

    conversion = convert_model(Nodes(), (torch.randn(32, 10_000, 7),))
    assert [r.into for r in conversion.rewrites] == ["linears"]
    assert not conversion.skips and conversion.report.passed
