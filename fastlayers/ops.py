"""The functions beneath the layers: schema, fake, autograd and autocast of each op.

Each op is defined here once, with the formula of `fastlayers._reference` registered for every backend. A
compiled kernel for CPU or CUDA tensors takes over because the dispatcher prefers it.
"""

from typing import Any

import torch
from torch import Tensor

from . import _extension, _reference
from ._monarch_ops import monarch_linear
from ._registration import autocast_now, register_autocast, transform_active
from ._registration import library as _library

__all__ = ["linear_list", "monarch_linear"]

_library.define(
    "linear_list(Tensor x, Tensor weight, Tensor? bias=None, bool out_channel_last=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_list_backward(Tensor grad_out, Tensor x, Tensor weight, bool need_x, bool need_weight,"
    " bool need_bias) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What the CPU kernels call for what they do not cover: other dtypes, very many features.
_library.define("linear_list_strided(Tensor x, Tensor weight, Tensor? bias, bool out_channel_last) -> Tensor")
_library.define(
    "linear_list_backward_strided(Tensor grad_out, Tensor x, Tensor weight, bool need_x, bool need_weight,"
    " bool need_bias) -> (Tensor, Tensor, Tensor)"
)
_linear_list = torch.ops.fastlayers.linear_list.default
_linear_list_backward = torch.ops.fastlayers.linear_list_backward.default


def linear_list(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_channel_last: bool = False
) -> Tensor:
    """Apply N separate linear maps, each to its own slice of ``x``.

    Equivalent to ``torch.stack([F.linear(x[..., n, :], weight[n], bias[n]) for n in range(N)], -2)``.

    Args:
        x: (*, N, I) with any leading dimensions and any strides, or (*, 1, I) shared by all N.
        weight: (N, O, I), of the dtype and on the device of ``x``.
        bias: (N, O) or None.
        out_channel_last: lay the result out in memory as (*, O, N); its shape stays (*, N, O).

    Returns:
        (*, N, O), contiguous (or, with ``out_channel_last``, ``.transpose(-1, -2)`` is). float16 and bfloat16
        accumulate in float32. The gradient of ``x`` is contiguous too, or lies as (*, I, N) where ``x`` does.

    Raises:
        ValueError: shapes or devices that do not fit together.
        TypeError: dtypes that differ (outside autocast), or arguments that are no tensors.
    """
    if transform_active():
        check_linear_list(x, weight, bias)
        y = _reference.linear_list(*autocast_now((x, weight, bias)))
        return y.mT.contiguous().mT if out_channel_last else y.contiguous()
    try:
        return _linear_list(x, weight, bias, out_channel_last)
    except RuntimeError:  # refused by a kernel or by the dispatcher: say it in our words
        check_linear_list(x, weight, bias)
        raise


def check_linear_list(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise the error a caller of `linear_list` can act on, if there is one."""
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"linear_list: {name} must be a tensor, got {type(value).__name__}")
    if weight.dim() != 3 or weight.shape[0] == 0:
        raise ValueError(f"linear_list: weight must be (N, O, I) with N >= 1, got {tuple(weight.shape)}")
    n, o, i = weight.shape
    if x.dim() < 2 or x.shape[-1] != i or x.shape[-2] not in (n, 1):
        raise ValueError(
            f"linear_list: x must be (*, N, I) = (*, {n}, {i}) or (*, 1, {i}) to match weight"
            f" {tuple(weight.shape)}, got {tuple(x.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (n, o):
        raise ValueError(
            f"linear_list: bias must be (N, O) = ({n}, {o}) to match weight {tuple(weight.shape)},"
            f" got {tuple(bias.shape)}"
        )
    others = (("weight", weight),) if bias is None else (("weight", weight), ("bias", bias))
    for name, other in others:
        if other.device != x.device:
            raise ValueError(f"linear_list: {name} must be on x's device {x.device}, got {other.device}")
        if other.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"linear_list: {name} must have x's dtype {x.dtype}, got {other.dtype}")


def _kernel_linear_list(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_channel_last: bool = False
) -> Tensor:
    check_linear_list(x, weight, bias)
    _extension.warn_if_missing(x.device.type)
    return _reference.linear_list_strided(x, weight, bias, out_channel_last)


def _fake_linear_list(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_channel_last: bool = False
) -> Tensor:
    check_linear_list(x, weight, bias)
    if out_channel_last:
        return _reference.empty_channel_last(x, x.shape[:-2], weight.shape[0], weight.shape[1])
    return x.new_empty((*x.shape[:-2], weight.shape[0], weight.shape[1]))


def _fake_linear_list_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if need_x and _reference.is_channel_last(x):
        grad_x = _reference.empty_channel_last(x, x.shape[:-2], x.shape[-2], x.shape[-1])
    else:
        grad_x = x.new_empty(x.shape if need_x else 0)
    grad_weight = weight.new_empty(weight.shape if need_weight else 0)
    return grad_x, grad_weight, weight.new_empty(weight.shape[:2] if need_bias else 0)


def _save_linear_list(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _grad_linear_list(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs = (*ctx.needs_input_grad, False)[:3]  # the dispatcher leaves out a bias of None
    grads = _linear_list_backward(grad_out, x, weight, *needs)
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None)


def _save_linear_list_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.produced = inputs[3:6]


def _grad_linear_list_backward(
    ctx: Any, grad_grad_x: Tensor, grad_grad_weight: Tensor, grad_grad_bias: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate the backward: its outputs are bilinear, so the op and its backward serve again."""
    grad_out, x, weight = ctx.saved_tensors
    has_x, has_weight, has_bias = ctx.produced
    need_out, need_x, need_weight = ctx.needs_input_grad[:3]
    new_out = new_x = new_weight = None
    if need_out:
        terms = []
        if has_x:
            terms.append(_linear_list(grad_grad_x, weight, None, False))
        if has_weight:
            terms.append(_linear_list(x, grad_grad_weight, grad_grad_bias if has_bias else None, False))
        elif has_bias:
            terms.append(grad_grad_bias.expand_as(grad_out))
        new_out = sum(terms[1:], start=terms[0]) if terms else torch.zeros_like(grad_out)
    need_x, need_weight = need_x and has_weight, need_weight and has_x
    if need_x or need_weight:
        other_x = grad_grad_x if has_x else x
        other_weight = grad_grad_weight if has_weight else weight
        new_x, new_weight, _ = _linear_list_backward(
            grad_out, other_x, other_weight, need_x, need_weight, False
        )
    return new_out, new_x if need_x else None, new_weight if need_weight else None, None, None, None


def _autocast_linear_list(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_channel_last: bool = False
) -> tuple[Any, ...]:
    return (*autocast_now((x, weight, bias)), out_channel_last)


_library.impl("linear_list", _kernel_linear_list, "CompositeExplicitAutograd")
_library.impl("linear_list_strided", _reference.linear_list_strided, "CompositeExplicitAutograd")
_library.impl(
    "linear_list_backward_strided", _reference.linear_list_backward_strided, "CompositeExplicitAutograd"
)
_library.impl("linear_list_backward", _reference.linear_list_backward_strided, "CompositeExplicitAutograd")
torch.library.register_fake("fastlayers::linear_list", _fake_linear_list, lib=_library)
torch.library.register_fake("fastlayers::linear_list_backward", _fake_linear_list_backward, lib=_library)
torch.library.register_autograd(
    "fastlayers::linear_list", _grad_linear_list, setup_context=_save_linear_list, lib=_library
)
torch.library.register_autograd(
    "fastlayers::linear_list_backward",
    _grad_linear_list_backward,
    setup_context=_save_linear_list_backward,
    lib=_library,
)
register_autocast("linear_list", _autocast_linear_list)
_extension.load()
