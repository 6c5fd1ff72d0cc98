"""The op beneath MonarchLinear: schema, fake, autograd and autocast. `fastlayers.ops` gives it its name."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _monarch_reference as _reference
from ._registration import autocast_now, library, register_autocast, transform_active

GROUPINGS = ("strided", "contiguous")

library.define(
    "monarch_linear(Tensor x, Tensor[] weights, Tensor? bias, int[] in_dims, int[] out_dims,"
    " int out_features, bool contiguous) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "monarch_linear_backward(Tensor grad_out, Tensor x, Tensor[] weights, int[] in_dims, int[] out_dims,"
    " bool contiguous, bool need_x, bool need_weights, bool need_bias) -> (Tensor, Tensor[], Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What the CPU kernels call for what they do not cover: other dtypes, empty batches, very large blocks.
library.define(
    "monarch_linear_strided(Tensor x, Tensor[] weights, Tensor? bias, int[] in_dims, int[] out_dims,"
    " int out_features, bool contiguous) -> Tensor"
)
library.define(
    "monarch_linear_backward_strided(Tensor grad_out, Tensor x, Tensor[] weights, int[] in_dims,"
    " int[] out_dims, bool contiguous, bool need_x, bool need_weights, bool need_bias)"
    " -> (Tensor, Tensor[], Tensor)"
)
_forward = torch.ops.fastlayers.monarch_linear.default
_backward = torch.ops.fastlayers.monarch_linear_backward.default


def monarch_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    out_features: int | None = None,
    grouping: str = "strided",
) -> Tensor:
    """Apply a Monarch matrix, a product of block-diagonal factors, to the last dimension of ``x``.

    For two dims and rank R, equivalent to ``x @ M.T + bias`` with the blocks of rank R

        M[(o0, o1), (i0, i1)] = sum_r weights[0][i1, i0, (o0, r)] * weights[1][o0, (r, i1), o1].

    In general, with ranks ``r_0 = r_N = 1`` and R between, factor k contracts ``(r_k, in_dims[k])`` into
    ``(out_dims[k], r_(k+1))``, and its batch runs over ``out_dims[:k]`` and then ``in_dims[k+1:]``.

    Args:
        x: (*, in_features) with any strides; what it lacks of ``prod(in_dims)`` counts as zeros.
        weights: N >= 2 factors, [prod(out_dims[:k]) * prod(in_dims[k+1:]), r_k * in_dims[k],
            out_dims[k] * r_(k+1)], of the dtype and on the device of ``x``.
        bias: (out_features,) or None.
        in_dims, out_dims: N sizes each.
        out_features: at most, and by default, ``prod(out_dims)``; the features beyond are not computed.
        grouping: which features of ``x`` share a block. "strided": feature (i0, i1, ...) of ``x`` is the one
            at i0 * prod(in_dims[1:]) + ..., so that a block's are prod(in_dims[1:]) apart. "contiguous":
            feature (i1, ..., i0), so that a block's are neighbours.

    Returns:
        (*, out_features), contiguous. float16 and bfloat16 accumulate in float32 within a factor. No result
        between the factors is kept for the backward, which computes them again.

    Raises:
        ValueError: sizes, shapes or devices that do not fit together.
        TypeError: dtypes that differ (outside autocast), or arguments that are no tensors.

    Source: Dao et al., "Monarch: expressive structured matrices for efficient and accurate training", 2022.
    """
    features = prod(out_dims) if out_features is None else out_features
    in_dims, out_dims, weights = list(in_dims), list(out_dims), list(weights)
    if grouping not in GROUPINGS:
        raise ValueError(f'monarch_linear: grouping must be "strided" or "contiguous", got {grouping!r}')
    contiguous = grouping == "contiguous"
    if transform_active():
        check_monarch_linear(x, weights, bias, in_dims, out_dims, features)
        x, bias, *weights = autocast_now((x, bias, *weights))
        return _reference.monarch_linear(x, weights, bias, in_dims, out_dims, features, contiguous)
    try:
        return _forward(x, weights, bias, in_dims, out_dims, features, contiguous)
    except RuntimeError:  # refused by a kernel or by the dispatcher: say it in our words
        check_monarch_linear(x, weights, bias, in_dims, out_dims, features)
        raise


def check_dims(name: str, in_dims: Sequence[int], out_dims: Sequence[int]) -> None:
    """Raise ValueError unless the dims are two or more positive sizes on both sides."""
    if len(in_dims) != len(out_dims) or len(in_dims) < 2:
        raise ValueError(
            f"{name}: in_dims and out_dims must have the same length, 2 or more,"
            f" got {tuple(in_dims)} and {tuple(out_dims)}"
        )
    for side, dims in (("in_dims", in_dims), ("out_dims", out_dims)):
        if any(d < 1 for d in dims):
            raise ValueError(f"{name}: {side} must be 1 or more each, got {tuple(dims)}")


def check_monarch_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    out_features: int,
) -> None:
    """Raise the error a caller of `monarch_linear` can act on, if there is one."""
    check_dims("monarch_linear", in_dims, out_dims)
    named = [("x", x), *((f"weights[{k}]", w) for k, w in enumerate(weights))]
    named += [] if bias is None else [("bias", bias)]
    for name, value in named:
        if not isinstance(value, Tensor):
            raise TypeError(f"monarch_linear: {name} must be a tensor, got {type(value).__name__}")
    if len(weights) != len(in_dims):
        raise ValueError(
            f"monarch_linear: weights must be {len(in_dims)} factors to match in_dims {tuple(in_dims)},"
            f" got {len(weights)}"
        )
    if x.dim() < 1 or x.shape[-1] > prod(in_dims):
        raise ValueError(
            f"monarch_linear: x must be (*, in_features) with in_features at most {prod(in_dims)} to match"
            f" in_dims {tuple(in_dims)}, got {tuple(x.shape)}"
        )
    if not 0 <= out_features <= prod(out_dims):
        raise ValueError(
            f"monarch_linear: out_features must be at most {prod(out_dims)} to match out_dims"
            f" {tuple(out_dims)}, got {out_features}"
        )
    rank = 1
    for k, weight in enumerate(weights):
        after = weight.shape[-1] // out_dims[k] if weight.dim() == 3 and k + 1 < len(weights) else 1
        batch = prod(out_dims[:k]) * prod(in_dims[k + 1 :])
        expected = (batch, rank * in_dims[k], out_dims[k] * max(after, 1))
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"monarch_linear: weights[{k}] must be {expected} to match in_dims {tuple(in_dims)} and"
                f" out_dims {tuple(out_dims)}, got {tuple(weight.shape)}"
            )
        rank = after
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(f"monarch_linear: bias must be ({out_features},), got {tuple(bias.shape)}")
    for name, other in named[1:]:
        if other.device != x.device:
            raise ValueError(f"monarch_linear: {name} must be on x's device {x.device}, got {other.device}")
        if other.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"monarch_linear: {name} must have x's dtype {x.dtype}, got {other.dtype}")


def _kernel_forward(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    in_dims: list[int],
    out_dims: list[int],
    out_features: int,
    contiguous: bool,
) -> Tensor:
    check_monarch_linear(x, weights, bias, in_dims, out_dims, out_features)
    weights = [w.contiguous() for w in weights]
    return _reference.monarch_linear_strided(x, weights, bias, in_dims, out_dims, out_features, contiguous)


def _kernel_backward(
    grad_out: Tensor, x: Tensor, weights: list[Tensor], *sizes_and_needs: Any
) -> tuple[Tensor, list[Tensor], Tensor]:
    weights = [w.contiguous() for w in weights]
    return _reference.monarch_linear_backward_strided(grad_out, x, weights, *sizes_and_needs)


def _fake_forward(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    in_dims: list[int],
    out_dims: list[int],
    out_features: int,
    contiguous: bool,
) -> Tensor:
    check_monarch_linear(x, weights, bias, in_dims, out_dims, out_features)
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_backward(
    grad_out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    in_dims: list[int],
    out_dims: list[int],
    contiguous: bool,
    need_x: bool,
    need_weights: bool,
    need_bias: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    grad_x = x.new_empty(x.shape if need_x else 0)
    grad_weights = [w.new_empty(w.shape if need_weights else 0) for w in weights]
    return grad_x, grad_weights, grad_out.new_empty(grad_out.shape[-1:] if need_bias else 0)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, _, in_dims, out_dims, _, contiguous = inputs
    ctx.save_for_backward(x, *weights)
    ctx.sizes = in_dims, out_dims, contiguous


def _grad_forward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    need_x, need_each, need_bias = ctx.needs_input_grad[:3]
    grad_x, grad_weights, grad_bias = _backward(
        grad_out, x, weights, *ctx.sizes, need_x, any(need_each), need_bias
    )
    return (
        grad_x if need_x else None,
        [grad if need else None for grad, need in zip(grad_weights, need_each, strict=True)],
        grad_bias if need_bias else None,
        *(None,) * 4,
    )


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    grad_out, x, weights, *sizes = inputs
    ctx.save_for_backward(grad_out, x, *weights)
    ctx.sizes, ctx.produced = tuple(sizes[:3]), tuple(sizes[3:])


def _grad_backward(
    ctx: Any, grad_grad_x: Tensor, grad_grad_weights: list[Tensor], grad_grad_bias: Tensor
) -> tuple[Any, ...]:
    """Differentiate the backward.

    Its outputs are linear in grad_out, in x and in every factor, so their product with the incoming
    gradients is <grad_out, F> where F adds up the forward with one of its inputs replaced. The op and its
    backward serve again, and can be differentiated further.
    """
    grad_out, x, *weights = ctx.saved_tensors
    in_dims, out_dims, contiguous = ctx.sizes
    has_x, has_weights, has_bias = ctx.produced
    need_out, need_x, need_each = ctx.needs_input_grad[:3]
    need_weights = any(need_each)
    terms: list[tuple[Tensor, list[Tensor], int]] = []  # x, weights, the factor that is replaced (-1: x)
    if has_x:
        terms.append((grad_grad_x, weights, -1))
    if has_weights:
        for k, replaced in enumerate(grad_grad_weights):
            terms.append((x, [*weights[:k], replaced, *weights[k + 1 :]], k))
    new_out = new_x = None
    new_weights: list[Tensor | None] = [None] * len(weights)
    if need_out:
        outputs = [
            _forward(a, w, None, in_dims, out_dims, grad_out.shape[-1], contiguous) for a, w, _ in terms
        ]
        outputs += [grad_grad_bias.expand_as(grad_out)] if has_bias else []
        new_out = sum(outputs[1:], start=outputs[0]) if outputs else torch.zeros_like(grad_out)
    for a, w, replaced_factor in terms:
        want_x = need_x and replaced_factor >= 0
        if not want_x and not need_weights:
            continue
        part_x, part_weights, _ = _backward(
            grad_out, a, w, in_dims, out_dims, contiguous, want_x, need_weights, False
        )
        if want_x:
            new_x = part_x if new_x is None else new_x + part_x
        for k, part in enumerate(part_weights):
            if k != replaced_factor and need_each[k]:
                old = new_weights[k]
                new_weights[k] = part if old is None else old + part
    return (new_out, new_x, new_weights, *(None,) * 6)


def _autocast_forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, *sizes: Any) -> tuple[Any, ...]:
    x, bias, *weights = autocast_now((x, bias, *weights))
    return (x, weights, bias, *sizes)


def flops_per_token(weight_shapes: Sequence[Sequence[int]]) -> int:
    """Floating-point operations of one token's forward: a multiplication and an addition per weight."""
    return 2 * sum(prod(shape) for shape in weight_shapes)


def _count_forward(x_shape: Any, weight_shapes: Any, *args: Any, **kwargs: Any) -> int:
    return int(prod(x_shape[:-1])) * flops_per_token(weight_shapes)


def _count_backward(
    grad_shape: Any,
    x_shape: Any,
    weight_shapes: Any,
    in_dims: Any,
    out_dims: Any,
    contiguous: bool,
    need_x: bool,
    need_weights: bool,
    need_bias: bool,
    **kwargs: Any,
) -> int:
    """The middle again, then for each factor a product for its gradient and one for its input's."""
    each = [flops_per_token([shape]) for shape in weight_shapes]
    again = sum(each[:-1]) + sum(each) if need_weights else 0
    to_input = sum(each) if need_x else (sum(each[1:]) if need_weights else 0)
    return int(prod(x_shape[:-1])) * (again + to_input)


for _suffix in ("", "_strided"):
    library.impl("monarch_linear" + _suffix, _kernel_forward, "CompositeExplicitAutograd")
    library.impl("monarch_linear_backward" + _suffix, _kernel_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fastlayers::monarch_linear", _fake_forward, lib=library)
torch.library.register_fake("fastlayers::monarch_linear_backward", _fake_backward, lib=library)
torch.library.register_autograd(
    "fastlayers::monarch_linear", _grad_forward, setup_context=_save_forward, lib=library
)
torch.library.register_autograd(
    "fastlayers::monarch_linear_backward", _grad_backward, setup_context=_save_backward, lib=library
)
register_autocast("monarch_linear", _autocast_forward)
register_flop_formula(torch.ops.fastlayers.monarch_linear)(_count_forward)
register_flop_formula(torch.ops.fastlayers.monarch_linear_backward)(_count_backward)
