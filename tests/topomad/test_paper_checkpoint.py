"""The authors' checkpoints load, give the authors' numbers, and nothing else loads."""

import copy
import pickle

import pytest
import torch
from sensitivity import one_ulp_envelope
from shared_data import shared_path

from fastlayers.equivalence import assert_as_accurate
from models.topomad import GraphLSTMVAE, load_paper_checkpoint

pytest.importorskip("torch_geometric", reason="paper mode takes its graph layers from torch-geometric")

NAMES = ("output", "enc_hidden", "mu", "logvar", "output_logvar")
FOLDERS = ("gcn", "gat", "lin")


def load(folder, dtype=torch.float32):
    path = shared_path(f"data/topomad_checkpoints/{folder}")
    expected = torch.load(path / "expected.pt", weights_only=True)
    return load_paper_checkpoint(path / "checkpoint.pt").to(dtype), expected


def run(model, expected, eps, windows=None):
    """Outputs in eval mode, loss in training mode and its gradients, by the names of the expected file."""
    dtype = next(model.parameters()).dtype
    windows = expected["windows"].to(dtype) if windows is None else windows
    eps = None if eps is None else eps.to(dtype)
    model.eval()
    outputs = model(windows, expected["edge_index"], use_teacher_forcing=True, eps=eps)
    numbers = {f"eval_{name}": tensor.detach() for name, tensor in zip(NAMES, outputs, strict=False)}
    model.train()
    model.zero_grad()
    loss = model.loss(windows, model(windows, expected["edge_index"], eps=eps))
    loss.backward()
    numbers["train_loss"] = loss.detach()
    return numbers | {f"grad/{name}": p.grad for name, p in model.named_parameters()}


def expected_key(name, suffix):
    return name.replace("grad/", f"grad_{suffix}/") if name.startswith("grad/") else f"{name}_{suffix}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_float64_is_the_authors(folder):
    model, expected = load(folder, torch.float64)
    numbers = run(model, expected, expected.get("eps_f64"))
    assert {expected_key(name, "f64") for name in numbers} | {"eps_f64"} >= {
        k for k in expected if "f64" in k
    }
    for name, tensor in numbers.items():
        authors = expected[expected_key(name, "f64")]
        assert (tensor - authors).abs().max() <= 1e-10 * authors.abs().max(), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_float32_is_as_accurate_as_the_authors(folder):
    model, expected = load(folder)
    eps = expected.get("eps_f32")
    reference, envelope = one_ulp_envelope(
        model, expected["windows"], lambda twin, windows: run(twin, expected, eps, windows)
    )
    for name, tensor in run(model, expected, eps).items():
        authors = expected[expected_key(name, "f32")]
        assert_as_accurate(tensor, authors, reference[name], envelope=envelope[name], name=name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_default_draw_is_the_recorded_one(folder):
    model, expected = load(folder)
    model.eval()
    torch.manual_seed(0)
    drawn = model(expected["windows"], expected["edge_index"])
    fed = model(expected["windows"], expected["edge_index"], eps=expected.get("eps_f32"))
    assert all(torch.equal(a, b) for a, b in zip(drawn, fed, strict=True))


@pytest.mark.parametrize("folder", FOLDERS)
def test_loading_keeps_the_file_and_the_random_state(folder):
    state = torch.random.get_rng_state()
    model, _ = load(folder)
    assert torch.equal(torch.random.get_rng_state(), state)
    file = torch.load(
        shared_path(f"data/topomad_checkpoints/{folder}/checkpoint.pt"), map_location="cpu", weights_only=True
    )
    loaded = model.state_dict()
    assert list(loaded) == list(file)
    assert all(torch.equal(loaded[key], file[key]) for key in file)
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("folder", FOLDERS)
def test_copies_and_pickles_give_the_same_numbers(folder):
    model, expected = load(folder)
    model.eval()
    eps = expected.get("eps_f32")
    first = model(expected["windows"], expected["edge_index"], eps=eps)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = twin(expected["windows"], expected["edge_index"], eps=eps)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        with torch.no_grad():
            next(twin.parameters()).zero_()
    assert next(model.parameters()).any()


@pytest.mark.parametrize("folder", FOLDERS)
def test_autocast_runs_forward_and_backward(folder):
    model, expected = load(folder)
    with torch.autocast("cpu", torch.bfloat16):
        result = model(expected["windows"], expected["edge_index"])
        loss = model.loss(expected["windows"], result)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.fixture
def gcn_state():
    return torch.load(shared_path("data/topomad_checkpoints/gcn/checkpoint.pt"), weights_only=True)


def refuse(tmp_path, state):
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError) as caught:
        load_paper_checkpoint(tmp_path / "checkpoint.pt")
    assert "checkpoint.pt" in str(caught.value)
    return str(caught.value)


def test_missing_and_unexpected_keys_are_listed(tmp_path, gcn_state):
    gcn_state["mu.3.wieght"] = gcn_state.pop("mu.3.weight")
    message = refuse(tmp_path, gcn_state)
    assert "not a whole checkpoint of TopoMAD" in message
    assert "missing: mu.3.weight" in message and "unexpected: mu.3.wieght" in message


def test_a_truncated_state_dict_is_refused(tmp_path, gcn_state):
    for length in (4, 20, 60, 87):
        kept = dict(list(gcn_state.items())[:length])
        message = refuse(tmp_path, kept)
        assert "missing: " in message and "unexpected" not in message, length


def test_a_foreign_state_dict_is_refused(tmp_path):
    message = refuse(tmp_path, torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict())
    assert "missing: encoder.cell_list.0.gconv.*" in message and "unexpected: 0.weight, 0.bias" in message
    message = refuse(tmp_path, {f"layer{i}": torch.zeros(1) for i in range(30)})
    assert "and 18 more" in message


def test_another_shape_is_refused(tmp_path, gcn_state):
    gcn_state["logvar.9.weight"] = gcn_state["logvar.9.weight"][:5].clone()
    assert "another shape: logvar.9.weight (5, 8) instead of (8, 8)" in refuse(tmp_path, gcn_state)


def test_mixed_dtypes_are_refused(tmp_path, gcn_state):
    gcn_state["mu.0.bias"] = gcn_state["mu.0.bias"].double()
    message = refuse(tmp_path, gcn_state)
    assert "expected tensors of one floating dtype, got torch.float32, torch.float64" in message


def test_what_is_no_state_dict_is_refused(tmp_path, gcn_state):
    assert "expected a state dict of tensors, got list" in refuse(tmp_path, [torch.zeros(2)])
    wrapped = refuse(tmp_path, {"epoch": 3, "state_dict": dict(gcn_state)})
    assert "a dict that also holds 'epoch' (int), 'state_dict' (dict)" in wrapped


def test_a_cut_file_is_refused(tmp_path):
    source = shared_path("data/topomad_checkpoints/gcn/checkpoint.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in (0, 100, len(source) // 2, len(source) - 10):
        path.write_bytes(source[:length])
        with pytest.raises(ValueError, match=r"cut\.pt: not a readable checkpoint"):
            load_paper_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_paper_checkpoint(tmp_path / "absent.pt")


@pytest.mark.parametrize("kind", ["GCN", "GAT", "WL1", "LIN"])
@pytest.mark.parametrize("bias", [(True, False), (False, True)])
@pytest.mark.parametrize("variational", [True, False])
def test_every_setting_is_read_off_the_file(tmp_path, kind, bias, variational):
    heads = (2, 3) if kind == "GAT" else (1, 1)
    model = GraphLSTMVAE(
        kind, 4, 5, 3, num_layers=(3, 3), heads=heads, bias=bias, variational=variational, mode="paper"
    ).double()
    torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
    loaded = load_paper_checkpoint(tmp_path / "checkpoint.pt")
    windows, edges = torch.randn(2, 4, 4, 5, dtype=torch.float64), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    eps = torch.randn(2, 4, 3, dtype=torch.float64)
    first, second = model(windows, edges, eps=eps), loaded(windows, edges, eps=eps)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert loaded.variational == variational


def test_the_name_of_gats_weight_in_older_files_is_known(tmp_path):
    model, _ = load("gat")
    old = {}
    for key, tensor in model.state_dict().items():
        if key.endswith("gconv.lin.weight"):
            old[key.replace("lin.weight", "lin_src.weight")] = tensor
            old[key.replace("lin.weight", "lin_dst.weight")] = tensor
        else:
            old[key] = tensor
    torch.save(old, tmp_path / "checkpoint.pt")
    loaded = load_paper_checkpoint(tmp_path / "checkpoint.pt").state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())
    changed = next(key for key in old if "lin_dst" in key)
    assert f"unexpected: {changed}" in refuse(tmp_path, old | {changed: old[changed] + 1})
