"""ops.linear_list: its accuracy on every shape and layout, its gradients, and what PyTorch asks of an op."""

import pytest
import torch
from torch import Tensor

from fastlayers import _reference, ops
from fastlayers.equivalence import assert_linear_as_accurate

SHAPES = {  # (lead, N, I, O)
    "ones": ((1,), 1, 1, 1),
    "odd": ((7,), 5, 7, 9),
    "topomad": ((32,), 50, 3, 3),
    "topomad-heads": ((8,), 50, 8, 19),
    "seven": ((32,), 100, 7, 7),
    "tails": ((33,), 3, 17, 35),
    "one-linear": ((300,), 1, 40, 65),
    "one-row": ((1,), 90, 7, 7),
    "leading-dimensions": ((2, 3), 4, 5, 6),
    "second-order": ((2, 1), 2, 3, 2),
    "no-leading-dimension": ((), 6, 4, 5),
    "long-sum": ((3,), 2, 1100, 5),
    "many-rows": ((1100,), 2, 4, 3),
    "wide": ((40,), 2, 96, 130),
    "empty-batch": ((0,), 3, 4, 5),
}


def tensors(
    shape: str, dtype: torch.dtype, *, bias: bool = True, shared: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    lead, n, i, o = SHAPES[shape]
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(torch.get_default_device(), dtype)

    x, weight = draw(*lead, 1 if shared else n, i), draw(n, o, i) / i**0.5
    return x, weight, draw(n, o) if bias else None, draw(*lead, n, o)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_as_accurate_as_the_loop(shape: str, dtype: torch.dtype, bias: bool) -> None:
    x, weight, b, grad_out = tensors(shape, dtype, bias=bias)
    assert_linear_as_accurate(ops.linear_list, None, x, weight, b, grad_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["odd", "topomad", "tails", "leading-dimensions", "many-rows"])
def test_shared_input(shape: str, dtype: torch.dtype) -> None:
    x, weight, bias, grad_out = tensors(shape, dtype, shared=True)
    assert_linear_as_accurate(ops.linear_list, None, x, weight, bias, grad_out)


def embed(x: Tensor, layout: str) -> Tensor:
    """Return x with the same values and another memory layout."""
    if layout == "channel-last":
        return x.mT.contiguous().mT
    if layout == "list-first":
        return x.movedim(-2, 0).contiguous().movedim(0, -2)
    if layout == "features-apart":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert layout == "rows-apart"
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


LAYOUTS = ["channel-last", "list-first", "features-apart", "rows-apart", "offset"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["odd", "tails", "leading-dimensions", "seven", "many-rows"])
def test_any_strides(shape: str, layout: str, dtype: torch.dtype) -> None:
    x, weight, bias, grad_out = tensors(shape, dtype)

    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = ops.linear_list(embed(x, layout), embed(weight, "channel-last"), bias)
        return embed(y, layout)  # its backward hands a strided grad_out down

    assert_linear_as_accurate(function, None, x, weight, bias, grad_out)


@pytest.mark.parametrize("shape", ["odd", "topomad", "many-rows", "wide"])
def test_expanded_input_and_gradient(shape: str) -> None:
    x, weight, bias, grad_out = tensors(shape, torch.float32)
    x, grad_out = x[..., :1, :].expand_as(x), grad_out[:1].expand_as(grad_out)
    assert_linear_as_accurate(ops.linear_list, None, x, weight, bias, grad_out)
    y = ops.linear_list(x, weight, bias)  # run_linear made a dense copy; here the strides are really 0
    assert_linear_as_accurate(y, None, x, weight, bias)
    grads = torch.ops.fastlayers.linear_list_backward(grad_out, x, weight, True, True, True)
    dense = torch.ops.fastlayers.linear_list_backward(
        grad_out.contiguous(), x.contiguous(), weight, True, True, True
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, dense, strict=True))
    assert grads[0].shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["odd", "topomad", "tails", "leading-dimensions", "empty-batch", "wide"])
def test_channel_last_result(shape: str, dtype: torch.dtype) -> None:
    x, weight, bias, grad_out = tensors(shape, dtype)
    y = ops.linear_list(x, weight, bias, out_channel_last=True)
    assert y.mT.is_contiguous()
    assert ops.linear_list(x, weight, bias).is_contiguous()
    x_channel_last = embed(x, "channel-last").requires_grad_()
    y = ops.linear_list(x_channel_last, weight, bias, out_channel_last=True)
    y.backward(embed(grad_out, "channel-last"))
    assert x_channel_last.grad is not None and x_channel_last.grad.mT.is_contiguous()

    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear_list(embed(x, "channel-last"), weight, bias, out_channel_last=True)

    assert_linear_as_accurate(function, None, x, weight, bias, grad_out)


def test_complex() -> None:
    for shared in (False, True):
        x, weight, bias, grad_out = tensors("odd", torch.float32, shared=shared)
        z = [torch.complex(t, t.flip(-1)) for t in (x, weight, bias, grad_out) if t is not None]
        leaves = [t.clone().requires_grad_() for t in z[:3]]
        y = ops.linear_list(*leaves)
        wide = [t.to(torch.complex128).requires_grad_() for t in z[:3]]
        reference = _reference.linear_list(*wide)
        grads = torch.autograd.grad(y, leaves, z[3])
        grads64 = torch.autograd.grad(reference, wide, z[3].to(torch.complex128))
        assert y.dtype == torch.complex64
        for new, exact in zip((y, *grads), (reference, *grads64), strict=True):
            # complex products are outside the judge: float64 identity to 2^-20 of the largest
            assert (new - exact).abs().max() <= 2**-20 * exact.abs().max()


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("shape", ["odd", "many-rows"])
def test_only_the_gradients_asked_for(shape: str, needs: tuple[int, int, int]) -> None:
    x, weight, _, grad_out = tensors(shape, torch.float32)
    whole = torch.ops.fastlayers.linear_list_backward(grad_out, x, weight, True, True, True)
    some = torch.ops.fastlayers.linear_list_backward(grad_out, x, weight, *map(bool, needs))
    for need, a, b in zip(needs, some, whole, strict=True):
        assert torch.equal(a, b) if need else a.numel() == 0


def small(shared: bool, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x, weight, b, _ = tensors("second-order", dtype, bias=bias, shared=shared)
    return tuple(t.clone().requires_grad_() for t in (x, weight, b) if t is not None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_gradients_of_both_orders(shared: bool, bias: bool, dtype: torch.dtype) -> None:
    inputs = small(shared, bias, dtype)
    assert torch.autograd.gradcheck(ops.linear_list, inputs)
    assert torch.autograd.gradgradcheck(ops.linear_list, inputs)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_second_order_with_one_input_frozen(frozen: int) -> None:
    inputs = small(False, True)
    inputs[frozen].requires_grad_(False)
    assert torch.autograd.gradgradcheck(ops.linear_list, inputs)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("out_channel_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_opcheck(shared: bool, bias: bool, out_channel_last: bool, dtype: torch.dtype) -> None:
    x, weight, *b = small(shared, bias, dtype)
    for args in ((x, weight), (embed(x.detach(), "channel-last"), weight)):
        arguments = (*args, b[0] if b else None, out_channel_last)
        torch.library.opcheck(torch.ops.fastlayers.linear_list.default, arguments)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, True)])
def test_opcheck_backward(shared: bool, needs: tuple[bool, bool, bool]) -> None:
    x, weight, _, grad_out = tensors("odd", torch.float32, shared=shared)
    for layout in ("rows-apart", "channel-last"):
        arguments = (grad_out, embed(x, layout), weight, *needs)
        torch.library.opcheck(torch.ops.fastlayers.linear_list_backward.default, arguments)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_grad_and_inference_mode(requires_grad: bool) -> None:
    x, weight, bias, _ = tensors("odd", torch.float32)
    weight.requires_grad_(requires_grad)
    plain = ops.linear_list(x, weight, bias)
    assert plain.requires_grad is requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            y = ops.linear_list(x, weight, bias)
        assert torch.equal(y, plain) and not y.requires_grad
    with torch.inference_mode():
        assert ops.linear_list(x.clone(), weight.detach().clone(), bias).is_inference()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_uses_the_active_dtype_as_linear_does(dtype: torch.dtype) -> None:
    x, weight, bias, grad_out = tensors("odd", torch.float32)
    device = torch.get_default_device().type
    with torch.autocast(device, dtype):
        assert (
            ops.linear_list(x, weight, bias).dtype == torch.nn.functional.linear(x, weight[0]).dtype == dtype
        )
        assert ops.linear_list(x.double(), weight.double(), None).dtype == torch.float64
        mixed = ops.linear_list(x.to(dtype), weight, bias)
        with torch.autocast(device, enabled=False):
            assert ops.linear_list(x, weight, bias).dtype == torch.float32
        vmapped = torch.func.vmap(lambda row: ops.linear_list(row, weight, bias))(x)
    assert vmapped.dtype == dtype
    half = [t.to(dtype) for t in (x, weight, bias, grad_out) if t is not None]
    assert torch.equal(mixed, ops.linear_list(*half[:3]))

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    with torch.autocast(device, dtype):
        y = ops.linear_list(*leaves)
    grads = torch.autograd.grad(y, leaves, half[3])
    expected = torch.ops.fastlayers.linear_list_backward(half[3], half[0], half[1], True, True, True)
    for grad, same in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32 and torch.equal(grad, same.float())
