"""MonarchLinear: construction, initial variance, state dict, views of it, and the tools of PyTorch."""

import copy
import importlib.util
import pickle
from math import prod

import pytest
import torch
from torch import nn

from fastlayers import MonarchLinear
from tests.shared_data import shared_path


def gist_layer():
    """The published layer's class."""
    path = shared_path("baselines/monarch_gist.py")
    spec = importlib.util.spec_from_file_location("monarch_gist", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MonarchLinear


@pytest.mark.parametrize(
    "in_dims, out_dims", [((6, 4), (5, 8)), ((4, 3, 5), (3, 6, 2)), ((2, 3, 4, 2), (3, 2, 2, 4))], ids=str
)
def test_published_checkpoints_load_and_compute_the_same(in_dims, out_dims):
    theirs = gist_layer()(prod(in_dims), prod(out_dims), in_dims, out_dims).double()
    ours = MonarchLinear(prod(in_dims), prod(out_dims), in_dims, out_dims, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(7, 3, prod(in_dims), dtype=torch.float64)
    assert (ours(x) - theirs(x)).abs().max() < 1e-12
    grad_out = torch.randn(7, 3, prod(out_dims), dtype=torch.float64)
    mine = torch.autograd.grad(ours(x), list(ours.parameters()), grad_out)
    yours = torch.autograd.grad(theirs(x), list(theirs.parameters()), grad_out)
    assert len(mine) == len(yours)
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(mine, yours, strict=True))


def test_the_published_notebook_runs():
    """Its cells with the import, the device and the batch changed, and ours for every layer."""
    baseline = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))
    baseline_size = sum(p.numel() for p in baseline.parameters())
    del baseline
    x = torch.randn(2, 3, 4096)
    two = ((64, 64), (64, 256)), ((256, 64), (64, 64))
    three = ((16, 16, 16), (16, 16, 64)), ((64, 16, 16), (16, 16, 16))
    rates = []
    for first, second in (two, three):
        monarch = nn.Sequential(
            MonarchLinear(4096, 16384, in_dims=first[0], out_dims=first[1]),
            nn.ReLU(),
            MonarchLinear(16384, 4096, in_dims=second[0], out_dims=second[1]),
        )
        out = monarch(x)
        out.sum().backward()
        assert out.shape == (2, 3, 4096)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in monarch.parameters())
        rates.append(sum(p.numel() for p in monarch.parameters()) / baseline_size)
    assert rates == [0.01968083483355201, 0.006011045677844567]  # the numbers that the notebook printed


SHAPES = [
    {"in_features": 512, "out_features": 256, "in_dims": (16, 32), "out_dims": (32, 8)},
    {"in_features": 512, "out_features": 256, "in_dims": (128, 4), "out_dims": (4, 64), "rank": 5},
    {"in_features": 256, "out_features": 384, "in_dims": (256, 1), "out_dims": (1, 384), "rank": 16},
    {"in_features": 512, "out_features": 512, "in_dims": (8, 8, 8), "out_dims": (8, 8, 8), "rank": 2},
    {"in_features": 307, "out_features": 211, "in_dims": (20, 20), "out_dims": (15, 15)},
]


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: f"{s['in_dims']}-{s['out_dims']}")
def test_initial_output_variance_is_that_of_linear(sizes):
    """A third of the input's, and the same for the gradient of x scaled by the sizes; six standard errors."""
    torch.manual_seed(0)
    samples = []
    for _ in range(40):
        layer = MonarchLinear(**sizes, bias=False)
        x = torch.randn(64, sizes["in_features"], requires_grad=True)
        y = layer(x)
        (grad_x,) = torch.autograd.grad(y, x, torch.randn_like(y))
        expected = torch.tensor([1 / 3, sizes["out_features"] / sizes["in_features"] / 3])
        samples.append(torch.stack([y.detach().square().mean(), grad_x.square().mean()]) / expected)
    ratio = torch.stack(samples)
    error = ratio.std(0) / len(samples) ** 0.5
    assert ((ratio.mean(0) - 1).abs() < 6 * error).all()
    assert (error < 0.02).all()


def test_mup_init():
    layer = MonarchLinear(512, 256, (16, 32), (32, 8), rank=3, init="mup")
    for weight in layer.weights:
        _, fan_in, fan_out = weight.shape
        bound = 3**0.5 * min(1.0, (fan_out / fan_in) ** 0.5) / fan_in**0.5
        assert 0.99 * bound < weight.abs().max() <= bound
    assert layer.lr_multipliers == (512 / (16 * 2), 512 / (96 * 2))


def test_views_of_the_layer():
    layer = MonarchLinear(23, 19, (3, 3, 3), (4, 3, 2), rank=2, grouping="contiguous", dtype=torch.float64)
    x = torch.randn(5, 23, dtype=torch.float64)
    assert (x @ layer.to_dense().T + layer.bias - layer(x)).abs().max() < 1e-12
    linear = layer.to_linear()
    assert type(linear) is nn.Linear and linear.weight.shape == (19, 23)
    assert (linear(x) - layer(x)).abs().max() < 1e-12
    layer.to_dense().sum().backward()
    assert layer.weights[0].grad.abs().sum() > 0
    weights = 9 * 3 * 8 + 12 * 6 * 6 + 12 * 6 * 2
    assert sum(p.numel() for p in layer.parameters()) == weights + 19
    assert layer.parameters_saved == 23 * 19 - weights
    assert layer.flops_per_token == 2 * weights
    without = MonarchLinear(4, 4, (2, 2), (2, 2), bias=False).eval()
    without.requires_grad_(False)
    linear = without.to_linear()
    assert linear.bias is None and not linear.weight.requires_grad and not linear.training


def test_repr_shows_the_structure():
    text = repr(MonarchLinear(4096, 16384, (64, 64), (64, 256), rank=2, device="meta"))
    for part in ("in_features=4096", "out_dims=(64, 256)", "rank=2", "grouping='strided'"):
        assert part in text
    assert "64 x 64 blocks of rank 2, 3.91% of the dense weight" in text


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
def test_state_dict_names_the_grouping(grouping):
    other = {"strided": "contiguous", "contiguous": "strided"}[grouping]
    make = lambda g: MonarchLinear(12, 12, (3, 4), (4, 3), grouping=g)  # noqa: E731
    saved = make(grouping).state_dict()
    assert set(saved) == {"weights.0", "weights.1", "bias", "_extra_state"}
    assert all(isinstance(v, torch.Tensor) for v in saved.values())
    make(grouping).load_state_dict(saved)
    target = nn.Sequential(make(other))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(RuntimeError) as info:
        target.load_state_dict({f"0.{k}": v for k, v in saved.items()})
    text = f"MonarchLinear '0': the checkpoint was saved with grouping \"{grouping}\", but the layer has"
    assert text in str(info.value)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), target.state_dict().values(), strict=True))


def test_a_checkpoint_without_grouping_is_strided():
    saved = MonarchLinear(12, 12, (3, 4), (4, 3)).state_dict()
    del saved["_extra_state"]
    keys = list(saved)
    MonarchLinear(12, 12, (3, 4), (4, 3)).load_state_dict(saved)
    assert list(saved) == keys
    with pytest.raises(RuntimeError, match="names no grouping, so it is of the published layer"):
        MonarchLinear(12, 12, (3, 4), (4, 3), grouping="contiguous").load_state_dict(saved)


BAD = [
    ({"in_dims": (3, 3)}, "the product of in_dims (3, 3) must reach in_features = 12, got 9"),
    ({"out_dims": (4, 2)}, "the product of out_dims (4, 2) must reach out_features = 12, got 8"),
    ({"out_dims": (4, 3, 1)}, "in_dims and out_dims must have the same length, 2 or more"),
    ({"in_dims": (-3, -4)}, "in_dims must be 1 or more each, got (-3, -4)"),
    ({"rank": 0}, "rank must be at least 1, got 0"),
    ({"grouping": "gist"}, 'grouping must be "strided" or "contiguous", got \'gist\''),
    ({"init": "kaiming"}, 'init must be "linear" or "mup", got \'kaiming\''),
]


@pytest.mark.parametrize("change, text", BAD, ids=[str(c) for c, _ in BAD])
def test_construction_refused(change, text):
    args = {"in_features": 12, "out_features": 12, "in_dims": (3, 4), "out_dims": (4, 3)} | change
    with pytest.raises(ValueError) as info:
        MonarchLinear(**args)
    assert f"MonarchLinear: {text}" in str(info.value)


def test_input_refused():
    layer = MonarchLinear(12, 12, (3, 5), (4, 3))
    for shape in ((2, 15), (2, 24), (4, 6), ()):
        with pytest.raises(ValueError) as info:
            layer(torch.randn(shape))
        assert f"MonarchLinear: x must be (*, in_features) = (*, 12), got {shape}" in str(info.value)
    with pytest.raises(TypeError, match=r"weights\[0\] must have x's dtype torch.float64, got torch.float32"):
        layer(torch.randn(2, 12).double())


def test_checkpoint_changes_nothing():
    """It is accepted; there is nothing that it could spare."""
    torch.manual_seed(0)
    plain = MonarchLinear(12, 12, (3, 4), (4, 3))
    same = MonarchLinear(12, 12, (3, 4), (4, 3), checkpoint=True)
    same.load_state_dict(plain.state_dict())
    x = torch.randn(5, 12)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = same(x)
    assert torch.equal(plain(x), y) and len(kept) == 3


@pytest.mark.parametrize("dims", [((6, 4), (5, 8)), ((2, 3, 4), (3, 2, 4))], ids=str)
def test_under_pytorchs_tools(dims):
    layer = MonarchLinear(prod(dims[0]) - 1, prod(dims[1]), *dims, rank=2, grouping="contiguous")
    x = torch.randn(5, layer.in_features)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    assert torch.equal(torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)), y)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), y)
    assert layer.to("meta")(x.to("meta")).shape == y.shape


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own
def test_compiles_whole_with_its_gradients():
    layer = MonarchLinear(23, 19, (5, 5), (4, 5), rank=2)
    x = torch.randn(5, 23)
    compiled = torch.compile(layer, fullgraph=True)
    results = []
    for module in (layer, compiled):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_training_with_adam_in_half_precision_lowers_the_loss():
    torch.manual_seed(0)
    target = torch.randn(16, 24)
    x = torch.randn(256, 24, dtype=torch.bfloat16)
    layer = MonarchLinear(24, 16, (6, 4), (4, 4), rank=3)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (layer(x) - x @ target.bfloat16().T).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
