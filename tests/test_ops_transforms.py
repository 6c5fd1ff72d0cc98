"""ops.linear_list under torch.func, forward AD, torch.compile and torch.export."""

import pytest
import torch
from torch import Tensor

from fastlayers import _reference, ops
from fastlayers.equivalence import assert_linear_as_accurate

# torch's own decompositions for forward AD still use torch.jit.script
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    double = torch.float64
    return (
        torch.randn(4, 5, 3, dtype=double),
        torch.randn(5, 2, 3, dtype=double),
        torch.randn(5, 2, dtype=double),
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to float64's rounding: the einsum of the formula and the kernel sum in other orders."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-13 * b.abs().max().clamp(min=1e-30))


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (weight * x.unsqueeze(-2)).sum(-1) + bias


def test_grad(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    for argnums in (0, 1, 2):
        new, old = (
            torch.func.grad(lambda *t, f=f: f(*t).square().sum(), argnums)(*inputs)
            for f in (ops.linear_list, formula)
        )
        assert close(new, old)


def test_vmap_of_grad(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    new, old = (
        torch.func.vmap(torch.func.grad(lambda *t, f=f: f(*t).square().sum(), (0, 1)), (0, None, None))(
            *inputs
        )
        for f in (ops.linear_list, formula)
    )
    assert all(close(a, b) for a, b in zip(new, old, strict=True))


def test_vmap_over_stacked_weights(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = inputs
    weights = torch.stack([weight, 2 * weight])
    new, old = (torch.func.vmap(lambda w, f=f: f(x, w, bias))(weights) for f in (ops.linear_list, formula))
    assert close(new, old)


def test_jvp(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    tangents = tuple(torch.randn_like(t) for t in inputs)
    new, old = (torch.func.jvp(f, inputs, tangents) for f in (ops.linear_list, formula))
    assert close(new[0], old[0]) and close(new[1], old[1])


def test_forward_ad_with_dual_numbers(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = inputs
    tangent = torch.randn_like(x)
    with torch.autograd.forward_ad.dual_level():
        y = ops.linear_list(torch.autograd.forward_ad.make_dual(x, tangent), weight, bias)
        derivative = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert derivative is not None and close(derivative, ops.linear_list(tangent, weight))


def test_hessian(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = inputs
    new, old = (
        torch.func.hessian(lambda w, f=f: f(x, w, bias).pow(3).sum())(weight)
        for f in (ops.linear_list, formula)
    )
    assert close(new, old)


def test_channel_last_in_a_transform(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.linear_list(x, *inputs[1:], out_channel_last=True)
        return y.sum(), y.mT.contiguous()

    assert close(torch.func.grad(loss, has_aux=True)(inputs[0])[1].mT, formula(*inputs))


def test_the_formula_is_the_loop(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    assert close(_reference.linear_list(*inputs), formula(*inputs))
    grad_out = torch.randn(4, 5, 2, dtype=torch.float64)
    leaves = tuple(t.requires_grad_() for t in inputs)
    grads = torch.autograd.grad(formula(*leaves), leaves, grad_out)
    for a, b in zip(_reference.linear_list_backward(grad_out, *inputs[:2]), grads, strict=True):
        assert close(a.detach(), b)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(fresh_dynamo: None, dynamic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad_out = (
        torch.randn(s, generator=generator) for s in ((6, 5, 7), (5, 4, 7), (5, 4), (6, 5, 4))
    )
    compiled = torch.compile(ops.linear_list, fullgraph=True, dynamic=dynamic)
    assert_linear_as_accurate(compiled, None, x, weight, bias, grad_out)
    assert torch.equal(compiled(x[:3], weight, bias), ops.linear_list(x[:3], weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x, weight, bias).dtype == torch.bfloat16


def test_compile_of_a_transform(fresh_dynamo: None, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    transform = torch.func.grad(lambda *t: ops.linear_list(*t).square().sum(), 1)
    compiled = torch.compile(transform, fullgraph=True, backend="aot_eager")
    assert close(compiled(*inputs), transform(*inputs))


def test_export_keeps_the_op(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return ops.linear_list(x, weight, bias)

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Model(), inputs, dynamic_shapes={"x": {0: batch}, "weight": None, "bias": None}
    )
    assert any(node.target is torch.ops.fastlayers.linear_list.default for node in program.graph.nodes)
    more = torch.randn(9, 5, 3, dtype=torch.float64)
    assert torch.equal(program.module()(more, *inputs[1:]), ops.linear_list(more, *inputs[1:]))
