"""LinearList: input forms, construction, conversion from and to nn.Linear, checkpoints."""

import copy
import io
import pickle
import re

import pytest
import torch
from shared_data import shared_path
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fastlayers import LinearList
from fastlayers.equivalence import assert_linear_as_accurate


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def loop(linears, x: Tensor) -> Tensor:
    return torch.stack([linear(x[..., n, :]) for n, linear in enumerate(linears)], -2)


def linears(n: int = 4, i: int = 3, o: int = 2, **options) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(i, o, **options) for _ in range(n))


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (0,)])
@pytest.mark.parametrize("n", [1, 4])
def test_forms_of_the_input(lead: tuple[int, ...], n: int) -> None:
    layer = LinearList(3, 2, n)
    x = torch.randn(*lead, n, 3)
    y = layer(x)
    assert y.shape == (*lead, n, 2) and y.is_contiguous()
    if y.numel():
        assert_linear_as_accurate(y, None, x, layer.weight, layer.bias)
    flat = layer(x.flatten(-2))
    assert flat.shape == (*lead, n * 2) and torch.equal(flat, y.flatten(-2))
    shared = torch.randn(*lead, 1, 3)
    assert torch.equal(layer(shared), layer(shared.expand(*lead, n, 3)))


def test_flat_input_with_strides() -> None:
    layer = LinearList(3, 2, 4)
    x = torch.randn(6, 24)[:, ::2]
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_one_linear_is_no_ambiguity() -> None:
    layer = LinearList(3, 2, 1)
    for shape in ((3,), (1, 3), (5, 3), (5, 1, 3)):
        x = torch.randn(shape)
        (head,) = layer
        assert layer(x).shape == (*shape[:-1], 2)
        assert_linear_as_accurate(
            layer(x).view(-1, 1, 2), head(x).view(-1, 1, 2), x.view(-1, 1, 3), *layer.parameters()
        )


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (4, 4), (7,), ()])
def test_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    text = f"LinearList: x must be (*, N, I) = (*, 4, 3), (*, 1, 3) or flat (*, N * I) = (*, 12), got {shape}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        LinearList(3, 2, 4)(torch.zeros(shape))


@pytest.mark.parametrize("name", ["in_features", "out_features", "num_linears"])
def test_refuses_sizes_below_one(name: str) -> None:
    sizes = {"in_features": 3, "out_features": 2, "num_linears": 4, name: 0}
    with pytest.raises(ValueError, match=f"^LinearList: {name} must be at least 1, got 0$"):
        LinearList(**sizes)


def test_construction() -> None:
    layer = LinearList(3, 2, 4, bias=False, dtype=torch.float64)
    assert layer.bias is None and layer.weight.dtype == torch.float64
    assert LinearList(3, 2, 4, device="meta").weight.is_meta
    assert repr(layer) == "LinearList(in_features=3, out_features=2, num_linears=4, bias=False)"
    assert [name for name, _ in LinearList(3, 2, 4).named_parameters()] == ["weight", "bias"]


def test_each_linear_starts_as_nn_linear_does() -> None:
    """Compare with the quantiles of nn.Linear's own draws (Kolmogorov-Smirnov at 1 %)."""
    layer, many = LinearList(16, 8, 400), linears(400, 16, 8)
    for name in ("weight", "bias"):
        new = getattr(layer, name).detach().flatten().sort().values
        old = torch.stack([getattr(m, name) for m in many]).detach().flatten().sort().values
        both = torch.cat([new, old])
        distance = (torch.searchsorted(new, both) - torch.searchsorted(old, both)).abs().max() / len(new)
        assert distance < 1.63 * (2 / len(new)) ** 0.5
        assert new.abs().max() <= 0.25


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_to_and_from_linears_is_exact(bias: bool, dtype: torch.dtype) -> None:
    old = linears(bias=bias, dtype=dtype).eval().requires_grad_(False)
    old[0].weight.data[0, 0] = float("nan")
    state = torch.get_rng_state()
    layer = LinearList.from_linears(old)
    new = layer.to_linears()
    assert torch.equal(state, torch.get_rng_state())
    assert (
        (layer.training, layer.weight.requires_grad)
        == (new.training, new[0].weight.requires_grad)
        == (False,) * 2
    )
    assert [type(m) for m in new] == [nn.Linear] * 4
    before, after = old.state_dict(), new.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[k].view(torch.uint8), after[k].view(torch.uint8)) for k in before)
    new[1].weight.fill_(7)
    assert not (layer.weight == 7).any()


def broken(kind: str) -> list[nn.Module]:
    items: list[nn.Module] = list(linears())
    if kind == "subclass":
        items[2] = type("Mine", (nn.Linear,), {})(3, 2)
    elif kind == "hook":
        items[2].register_forward_hook(lambda *_: None)
    elif kind == "forward":
        items[2].forward = lambda x: x
    elif kind == "buffer":
        items[2].register_buffer("mask", torch.ones(2, 3))
    elif kind == "parametrized":
        parametrizations.weight_norm(items[2])
    elif kind == "tied":
        items[2].weight = items[0].weight
    elif kind == "same":
        items[2] = items[0]
    elif kind == "frozen":
        items[2].weight.requires_grad_(False)
    else:
        items[2] = {
            "in_features": lambda: nn.Linear(4, 2),
            "out_features": lambda: nn.Linear(3, 5),
            "bias": lambda: nn.Linear(3, 2, bias=False),
            "dtype": lambda: nn.Linear(3, 2, dtype=torch.float64),
            "device": lambda: nn.Linear(3, 2, device="meta"),
        }[kind]()
    return items


REFUSALS = {
    "subclass": (TypeError, "linears[2] must be precisely an nn.Linear, got Mine"),
    "hook": (TypeError, "linears[2] must have no hooks, got _forward_hooks"),
    "forward": (TypeError, "linears[2] must have nn.Linear's forward, got one of its own"),
    "buffer": (TypeError, "linears[2] must own just weight and bias, got bias, mask, weight"),
    "parametrized": (TypeError, "linears[2] must be precisely an nn.Linear, got ParametrizedLinear"),
    "tied": (ValueError, "linears[0] and linears[2] share a parameter; a stack would untie them"),
    "same": (ValueError, "linears[0] and linears[2] share a parameter; a stack would untie them"),
    "in_features": (
        ValueError,
        "all linears must have the same in_features; linears[0] has 3, linears[2] has 4",
    ),
    "out_features": (
        ValueError,
        "all linears must have the same out_features; linears[0] has 2, linears[2] has 5",
    ),
    "bias": (ValueError, "all linears must have the same bias; linears[0] has True, linears[2] has False"),
    "dtype": (
        ValueError,
        "all linears must have the same dtype; linears[0] has torch.float32, linears[2] has torch.float64",
    ),
    "device": (ValueError, "all linears must have the same device; linears[0] has cpu, linears[2] has meta"),
    "frozen": (
        ValueError,
        "all linears must have the same requires_grad; linears[0] has (True, True),"
        " linears[2] has (False, True)",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_from_linears_refuses(kind: str) -> None:
    error, text = REFUSALS[kind]
    with pytest.raises(error) as caught:
        LinearList.from_linears(broken(kind))
    assert str(caught.value) == f"LinearList.from_linears: {text}"


def test_from_no_linears() -> None:
    with pytest.raises(
        ValueError, match=r"^LinearList\.from_linears: linears must hold at least one nn\.Linear, got none$"
    ):
        LinearList.from_linears([])


class Model(nn.Module):
    def __init__(self, heads: nn.Module) -> None:
        super().__init__()
        self.heads = heads


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_loads_the_keys_of_a_module_list(bias: bool, assign: bool) -> None:
    old = Model(linears(12, bias=bias))
    new = Model(LinearList(3, 2, 12, bias=bias))
    state = old.state_dict()
    keys = list(state)
    assert new.load_state_dict(state, assign=assign) == ([], [])
    assert list(state) == keys
    x = torch.randn(5, 12, 3)
    assert_linear_as_accurate(new.heads(x), None, x, new.heads.weight, new.heads.bias)
    assert torch.equal(new.heads.weight[11], old.heads[11].weight)
    assert list(new.state_dict()) == ["heads.weight"] + ["heads.bias"] * bias
    assert new.load_state_dict(new.state_dict()) == ([], [])
    bare = LinearList(3, 2, 12, bias=bias)
    assert bare.load_state_dict(old.heads.state_dict()) == ([], [])
    assert torch.equal(bare.weight, new.heads.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("heads.2.weight"), 'Missing key(s) in state_dict: "heads.2.weight". '),
        (lambda s: s.pop("heads.1.bias"), 'Missing key(s) in state_dict: "heads.1.bias". '),
        (
            lambda s: s.update({"heads.4.weight": torch.ones(2, 3)}),
            'Unexpected key(s) in state_dict: "heads.4.weight". ',
        ),
        (
            lambda s: s.update({"heads.0.scale": torch.ones(2)}),
            'Unexpected key(s) in state_dict: "heads.0.scale". ',
        ),
        (
            lambda s: s.update({"heads.3.weight": torch.ones(3, 2)}),
            "size mismatch for heads.3.weight: copying a param with shape (3, 2) from checkpoint,"
            " the shape in current model is (2, 3).",
        ),
    ],
)
def test_old_keys_are_checked_strictly(change, message: str) -> None:
    state = Model(linears()).state_dict()
    change(state)
    with pytest.raises(RuntimeError) as caught:
        Model(LinearList(3, 2, 4)).load_state_dict(state)
    assert str(caught.value).splitlines()[1:] == [f"\t{message}"]


def test_old_keys_without_strict_load_what_is_there() -> None:
    state, new = Model(linears()).state_dict(), Model(LinearList(3, 2, 4))
    before = new.heads.weight.detach().clone()
    del state["heads.2.weight"]
    assert new.load_state_dict(state, strict=False) == (["heads.2.weight"], [])
    assert torch.equal(new.heads.weight[2], before[2])
    assert torch.equal(new.heads.weight[3], state["heads.3.weight"])


def test_loads_the_wide_layout() -> None:
    layer, wide = LinearList(3, 2, 4, bias=False), torch.randn(2, 12)
    assert layer.load_state_dict({"weight": wide}) == ([], [])
    for n in range(4):
        assert torch.equal(layer.weight[n], wide[:, 3 * n : 3 * n + 3])
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({"weight": torch.randn(12, 2)})


def test_copies_pickles_and_calls_functionally() -> None:
    layer, x = LinearList(3, 2, 4), torch.randn(5, 4, 3)
    loop(layer, x).sum().backward()  # fills the cache of rows, which are no leaves
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert torch.equal(other(x), layer(x)) and torch.equal(loop(other, x), loop(layer, x))
        other.weight.data.zero_()
    assert layer.weight.any()
    weights = {"weight": torch.zeros(4, 2, 3), "bias": torch.ones(4, 2)}
    assert (torch.func.functional_call(layer, weights, (x,)) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moves_and_casts_as_a_module(dtype: torch.dtype) -> None:
    layer, x = LinearList(3, 2, 4), torch.randn(5, 4, 3)
    loop(layer, x)
    layer.to(dtype)
    assert layer(x.to(dtype)).dtype == loop(layer, x.to(dtype)).dtype == dtype


def test_trains_as_the_loop_does() -> None:
    old = linears().double()
    new, x, target = (
        LinearList.from_linears(old),
        torch.randn(8, 4, 3).double(),
        torch.randn(8, 4, 2).double(),
    )
    for model, forward in ((old, lambda x: loop(old, x)), (new, new)):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (forward(x) - target).square().sum().backward()
            optimizer.step()
    for n, linear in enumerate(old):  # float64 identity: five steps of the same arithmetic
        assert (linear.weight - new.weight[n]).abs().max() <= 1e-12
        assert (linear.bias - new.bias[n]).abs().max() <= 1e-12


def readme_blocks() -> list[str]:
    """The two Python blocks of the original LinearList's README, its loop and its usage."""
    text = shared_path("seeds/linearlist_readme.txt").read_text()
    starts = [m.start() for m in re.finditer(r"^import torch$", text, re.M)]
    return [text[start : text.index("print(end-begin)", start) + len("print(end-begin)")] for start in starts]


def test_the_original_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = readme_blocks()
    assert len(blocks) == 2
    results = []
    for block in blocks:
        block = block.replace("from LinearList import LinearList", "from fastlayers import LinearList")
        block = block.replace('"cuda:0"', '"cpu"')
        assert "cuda" not in block
        namespace: dict = {}
        exec(block, namespace)
        results.append(namespace)
    original, fast = results
    assert fast["y"].shape == original["y"].shape == (32, 10000, 7)
    loaded = LinearList(7, 7, 10000, bias=False)
    loaded.load_state_dict(original["ll"].state_dict())
    x = original["x"][:2]
    with torch.no_grad():
        assert_linear_as_accurate(
            fast["deal_list_faster"](loaded, x), original["deal_list"](original["ll"], x), x, loaded.weight
        )
