"""ops.monarch_linear: the formula, every path to it, its gradients, and what it refuses."""

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from fastlayers import _monarch_reference, ops
from fastlayers._monarch_linear import weight_shapes
from fastlayers.equivalence import assert_as_accurate

CASES = {  # in_dims, out_dims, rank, in_features, out_features
    "ones": ((1, 1), (1, 1), 1, 1, 1),
    "odd": ((3, 5), (7, 9), 1, 15, 63),
    "rank": ((8, 4), (4, 6), 3, 32, 24),
    "low-rank": ((29, 1), (1, 31), 5, 29, 31),
    "tail": ((17, 19), (18, 33), 2, 323, 594),
    "padded": ((6, 6), (5, 5), 2, 31, 23),
    "padded by groups": ((4, 8), (6, 8), 2, 13, 17),
    "three": ((2, 5, 3), (4, 3, 5), 2, 30, 60),
    "four": ((2, 3, 2, 4), (3, 2, 4, 2), 2, 48, 48),
    "three padded": ((3, 3, 3), (4, 3, 2), 2, 23, 19),
}


def make(case: str, dtype: torch.dtype, *lead: int, bias: bool = True, seed: int = 0):
    in_dims, out_dims, rank, in_features, out_features = CASES[case]
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    x = draw(*lead, in_features)
    weights = [draw(*shape) / shape[1] ** 0.5 for shape in weight_shapes(in_dims, out_dims, rank)]
    b = draw(out_features) if bias else None
    return x, weights, b, {"in_dims": in_dims, "out_dims": out_dims, "out_features": out_features}


def reference(x: Tensor, weights: list[Tensor], bias: Tensor | None, sizes: dict, grouping: str) -> Tensor:
    args = sizes["in_dims"], sizes["out_dims"], sizes["out_features"], grouping == "contiguous"
    return _monarch_reference.monarch_linear(x, weights, bias, *args)


def run(function, x, weights, bias):
    """The output and every gradient, in one list."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *weights, *([] if bias is None else [bias]))]
    y = function(leaves[0], leaves[1 : 1 + len(weights)], None if bias is None else leaves[-1])
    grad_out = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_out)]


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
def test_two_dims_are_the_index_formula(grouping):
    """M[(o0,o1),(i0,i1)] = sum_r W0[i1, i0, (o0,r)] W1[o0, (r,i1), o1], written as a sum."""
    (i0, i1), (o0, o1), rank = in_dims, out_dims, _ = (3, 4), (2, 5), 2
    w0, w1 = (torch.randn(s, dtype=torch.float64) for s in weight_shapes(in_dims, out_dims, rank))
    matrix = torch.zeros(o0 * o1, i0 * i1, dtype=torch.float64)
    for p, q, k, m in product(range(o0), range(o1), range(i0), range(i1)):
        column = k * i1 + m if grouping == "strided" else m * i0 + k
        for r in range(rank):
            matrix[p * o1 + q, column] += w0[m, k, p * rank + r] * w1[p, r * i1 + m, q]
    x = torch.randn(6, i0 * i1, dtype=torch.float64)
    y = ops.monarch_linear(x, [w0, w1], in_dims=in_dims, out_dims=out_dims, grouping=grouping)
    assert (y - x @ matrix.T).abs().max() < 1e-12


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
def test_three_dims_are_the_index_formula(grouping):
    (i0, i1, i2), (o0, o1, o2), rank = in_dims, out_dims, _ = (2, 3, 2), (3, 2, 2), 2
    w0, w1, w2 = (torch.randn(s, dtype=torch.float64) for s in weight_shapes(in_dims, out_dims, rank))
    matrix = torch.zeros(o0 * o1 * o2, i0 * i1 * i2, dtype=torch.float64)
    for a, b, c, p, q, s in product(*map(range, (i0, i1, i2, o0, o1, o2))):
        column = (a * i1 + b) * i2 + c if grouping == "strided" else (b * i2 + c) * i0 + a
        for r, t in product(range(rank), repeat=2):
            first = w0[b * i2 + c, a, p * rank + r]
            second = w1[p * i2 + c, r * i1 + b, q * rank + t]
            matrix[(p * o1 + q) * o2 + s, column] += first * second * w2[p * o1 + q, t * i2 + c, s]
    x = torch.randn(6, i0 * i1 * i2, dtype=torch.float64)
    y = ops.monarch_linear(x, [w0, w1, w2], in_dims=in_dims, out_dims=out_dims, grouping=grouping)
    assert (y - x @ matrix.T).abs().max() < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_accurate_as_plain_pytorch(case, dtype, grouping, bias):
    """The op and its gradients, against the chain of einsums in the same dtype."""
    for lead in ((3, 2), (53,)):
        x, weights, b, sizes = make(case, dtype, *lead, bias=bias)

        def op(x, weights, bias, sizes=sizes):
            return ops.monarch_linear(x, weights, bias, **sizes, grouping=grouping)

        def plain(x, weights, bias, sizes=sizes):
            return reference(x, weights, bias, sizes, grouping)

        exact = run(plain, x.double(), [w.double() for w in weights], None if b is None else b.double())
        for i, (new, old, ref) in enumerate(
            zip(run(op, x, weights, b), run(plain, x, weights, b), exact, strict=True)
        ):
            assert new.shape == old.shape and new.dtype == dtype
            assert_as_accurate(new, old, ref, name=f"{case}, {lead}, result {i}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
@pytest.mark.parametrize("case", CASES)
def test_in_float64_and_complex(case, grouping, dtype):
    x, weights, b, sizes = make(case, dtype, 53)
    if dtype.is_complex:
        x, b, weights = x * (1 + 2j), b * 1j, [w * (1 - 0.5j) for w in weights]
    new = run(lambda *a: ops.monarch_linear(*a, **sizes, grouping=grouping), x, weights, b)
    old = run(lambda *a: reference(*a, sizes, grouping), x, weights, b)
    for a, c in zip(new, old, strict=True):
        assert (a - c).abs().max() <= 1e-12 * max(1.0, c.abs().max())


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
@pytest.mark.parametrize("case", ["odd", "padded", "three padded"])
def test_first_and_second_derivatives(case, grouping):
    x, weights, b, sizes = make(case, torch.float64, 2)
    leaves = [t.requires_grad_() for t in (x, b, *weights)]

    def op(x, b, *weights):
        return ops.monarch_linear(x, weights, b, **sizes, grouping=grouping)

    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(op, leaves, fast_mode=True)


def test_second_derivative_with_few_inputs_needing_it():
    x, weights, b, sizes = make("three", torch.float64, 2)
    for index in range(5):
        leaves = [t.clone().requires_grad_(i == index) for i, t in enumerate((x, b, *weights))]
        assert torch.autograd.gradgradcheck(
            lambda x, b, *w: ops.monarch_linear(x, w, b, **sizes), leaves, fast_mode=True
        )


def test_opcheck():
    x, weights, b, sizes = make("three padded", torch.float32, 3)
    weights = [w.requires_grad_() for w in weights]
    args = (x, weights, b, list(sizes["in_dims"]), list(sizes["out_dims"]), sizes["out_features"], True)
    torch.library.opcheck(torch.ops.fastlayers.monarch_linear.default, args)
    grad_out = torch.randn(3, sizes["out_features"])
    args = (grad_out, x, weights, *args[3:5], False, True, True, True)
    torch.library.opcheck(torch.ops.fastlayers.monarch_linear_backward.default, args)


@pytest.mark.parametrize("lead", [(0,), (2, 0, 3), ()])
def test_empty_batch_and_no_batch(lead):
    x, weights, b, sizes = make("rank", torch.float32, *lead)
    y, grad_x, *grads = run(lambda *a: ops.monarch_linear(*a, **sizes), x, weights, b)
    assert y.shape == (*lead, 24) and grad_x.shape == x.shape
    assert all(bool((g == 0).all()) == (0 in lead) for g in grads)


@pytest.mark.parametrize("grouping", ["strided", "contiguous"])
def test_any_strides_in_contiguous_out(grouping):
    x, weights, b, sizes = make("rank", torch.float64, 3, 4)
    forms = [x.transpose(0, 1), x.expand(2, 3, 4, 32), x.repeat_interleave(2, -1)[..., ::2], x[:, 1:3]]
    forms += [x.movedim(-1, 0).contiguous().movedim(0, -1)]
    for form in forms:
        y = ops.monarch_linear(form, weights, b, **sizes, grouping=grouping)
        assert y.is_contiguous()
        assert torch.equal(y, ops.monarch_linear(form.contiguous(), weights, b, **sizes, grouping=grouping))
    views = [torch.stack([w, w], -1)[..., 0] for w in weights]
    assert torch.equal(ops.monarch_linear(x, views, b, **sizes), ops.monarch_linear(x, weights, b, **sizes))


def test_expanded_output_gradient():
    x, weights, b, sizes = make("padded", torch.float64, 4)
    x.requires_grad_()
    ops.monarch_linear(x, weights, b, **sizes).sum().backward()
    grad = x.grad.clone()
    x.grad = None
    (ops.monarch_linear(x, weights, b, **sizes) * torch.ones(4, 23).double()).sum().backward()
    assert torch.equal(grad, x.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own jvp decompositions
def test_torch_func_transforms():
    """register_autograd alone would raise under grad and give zero tangents under jvp."""
    x, weights, b, sizes = make("rank", torch.float64, 5)

    def loss(x, b, *weights):
        return ops.monarch_linear(x, weights, b, **sizes).square().sum()

    leaves = [t.clone().requires_grad_() for t in (x, b, *weights)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, c in zip(torch.func.grad(loss, (0, 1, 2, 3))(x, b, *weights), expected, strict=True):
        assert (a - c).abs().max() < 1e-12
    per_sample = torch.func.vmap(torch.func.grad(loss), (0, None, None, None))(x, b, *weights)
    assert (per_sample - expected[0]).abs().max() < 1e-12
    _, tangent = torch.func.jvp(lambda x: loss(x, b, *weights), (x,), (x,))
    assert abs(tangent - (expected[0] * x).sum()) < 1e-10
    assert torch.func.hessian(loss)(x[0], b, *weights).abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    x, weights, b, sizes = make("rank", torch.float32, 5)
    leaves = [t.requires_grad_() for t in (x, b, *weights)]
    with torch.autocast("cpu", dtype):
        y = ops.monarch_linear(x, weights, b, **sizes)
    assert y.dtype == dtype
    half = [t.detach().to(dtype) for t in leaves]
    assert torch.equal(y, ops.monarch_linear(half[0], half[2:], half[1], **sizes))
    y.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)
    with torch.autocast("cpu", dtype):
        y = torch.func.vmap(lambda x: ops.monarch_linear(x, weights, b, **sizes))(x)
    assert y.dtype == dtype


def test_nothing_but_its_inputs_is_kept_for_the_backward():
    x, weights, b, sizes = make("three", torch.float32, 100)
    leaves = [t.requires_grad_() for t in (x, b, *weights)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.monarch_linear(x, weights, b, **sizes)
    pointers = {t.data_ptr() for t in leaves}
    assert len(kept) == 4 and {t.data_ptr() for t in kept} <= pointers


def test_flop_counter():
    x, weights, b, sizes = make("three", torch.float32, 4, 5)
    x.requires_grad_()
    weights = [w.requires_grad_() for w in weights]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as forward:
        y = ops.monarch_linear(x, weights, b, **sizes)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as backward:
        y.sum().backward()
    each = [2 * 20 * w.numel() for w in weights]
    assert forward.get_total_flops() == sum(each)
    assert backward.get_total_flops() == 2 * sum(each) + sum(each[:-1])  # the middle is computed again


BAD = [
    ({"grouping": "blocked"}, ValueError, 'grouping must be "strided" or "contiguous", got \'blocked\''),
    ({"in_dims": (8,)}, ValueError, "in_dims and out_dims must have the same length, 2 or more"),
    ({"out_dims": (0, 6)}, ValueError, "out_dims must be 1 or more each, got (0, 6)"),
    (
        {"in_dims": (4, 4)},
        ValueError,
        "x must be (*, in_features) with in_features at most 16 to match in_dims (4, 4), got (2, 32)",
    ),
    ({"out_dims": (4, 5)}, ValueError, "out_features must be at most 20 to match out_dims (4, 5), got 24"),
    ({"in_dims": (4, 8)}, ValueError, "weights[0] must be (8, 4, 12) to match in_dims (4, 8)"),
    ({"weights": 1}, ValueError, "weights must be 2 factors to match in_dims (8, 4), got 1"),
    ({"out_features": 20}, ValueError, "bias must be (20,), got (24,)"),
    (
        {"bias": torch.zeros(24).double()},
        TypeError,
        "bias must have x's dtype torch.float32, got torch.float64",
    ),
    ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    ({"bias": torch.zeros(24, device="meta")}, ValueError, "bias must be on x's device cpu, got meta"),
]


@pytest.mark.parametrize("change, error, text", BAD, ids=[t[:40] for *_, t in BAD])
def test_refused(change, error, text):
    x, weights, b, sizes = make("rank", torch.float32, 2)
    args = {"x": x, "weights": weights, "bias": b, **sizes, **change}
    if change.get("weights"):
        args["weights"] = weights[:1]
    with pytest.raises(error) as info:
        ops.monarch_linear(**args)
    assert f"monarch_linear: {text}" in str(info.value)


def test_no_layout_copy_between_the_factors():
    """The published layer makes 129 copies forward and 390 in all at these dims; ours none, or x's one."""
    in_dims, out_dims = (8, 64), (64, 16)
    weights = [torch.randn(s, requires_grad=True) for s in weight_shapes(in_dims, out_dims, 1)]
    x = torch.randn(32, prod(in_dims), requires_grad=True)
    for grouping, allowed in (("contiguous", 0), ("strided", 3)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = ops.monarch_linear(x, weights, in_dims=in_dims, out_dims=out_dims, grouping=grouping)
            torch.autograd.grad(y, [x, *weights], torch.ones_like(y))
        copies = sum(e.count for e in profile.key_averages() if e.key == "aten::copy_")
        assert copies <= allowed
