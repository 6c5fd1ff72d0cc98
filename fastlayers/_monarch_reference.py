"""`monarch_linear` as its formula in plain PyTorch: the definition, the fallback and the oracle.

Between two factors the features of one token form a grid (O_<k, r_k * i_k, I_>k): the output dims that are
done, the rank and the input dim that factor k contracts, and the input dims still to come. `monarch_linear`
and `monarch_linear_backward` are the definition, one einsum per factor. The functions ending in ``_strided``
compute the same with ``bmm`` on strided views and no copy between the factors; they serve where no kernel is
compiled.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Factor(NamedTuple):
    """The sizes of one factor, whose weight is [done * rest, in_size, out_size]."""

    done: int  # O_<k, product of the output dims before it
    rest: int  # I_>k, product of the input dims after it
    in_size: int  # r_k * i_k
    out_size: int  # o_k * r_(k+1)


def factors(in_dims: Sequence[int], out_dims: Sequence[int], weights: Sequence[Tensor]) -> list[Factor]:
    """Read the sizes of every factor off its weight."""
    return [
        Factor(prod(out_dims[:k]), prod(in_dims[k + 1 :]), weight.shape[1], weight.shape[2])
        for k, weight in enumerate(weights)
    ]


def monarch_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    out_features: int,
    contiguous: bool,
) -> Tensor:
    """Multiply x by the factors, one after another, and add the bias."""
    lead = x.shape[:-1]
    y = _states(x, weights, in_dims, out_dims, contiguous)[-1].reshape(*lead, prod(out_dims))
    y = y[..., :out_features]
    return y.contiguous() if bias is None else y + bias


def monarch_linear_backward(
    grad_out: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    contiguous: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return grad_x, the gradients of the factors, and grad_bias."""
    tokens = x.shape[:-1].numel()
    states = _states(x, weights, in_dims, out_dims, contiguous)
    grad_out = grad_out.reshape(tokens, grad_out.shape[-1])
    grad = F.pad(grad_out, (0, prod(out_dims) - grad_out.shape[-1]))
    grad_weights = []
    for factor, weight, state in reversed(
        list(zip(factors(in_dims, out_dims, weights), weights, states[:-1], strict=True))
    ):
        weight = weight.reshape(factor)
        grad = grad.reshape(tokens, factor.done, factor.out_size, factor.rest)
        state = state.reshape(tokens, factor.done, factor.in_size, factor.rest)
        grad_weights.append(torch.einsum("tapc,taqc->acpq", state.conj(), grad).flatten(0, 1))
        grad = torch.einsum("taqc,acpq->tapc", grad, weight.conj())
    grad = grad.reshape(tokens, in_dims[0], prod(in_dims[1:]))
    grad = (grad.mT if contiguous else grad).reshape(tokens, prod(in_dims))
    return grad[:, : x.shape[-1]].reshape(x.shape), grad_weights[::-1], grad_out.sum(0)


def _states(
    x: Tensor, weights: Sequence[Tensor], in_dims: Sequence[int], out_dims: Sequence[int], contiguous: bool
) -> list[Tensor]:
    """The input of every factor, and the output of the last: (tokens, O_<k, r_k * i_k, I_>k)."""
    tokens, rest = x.shape[:-1].numel(), prod(in_dims[1:])
    x = F.pad(x.reshape(tokens, x.shape[-1]), (0, prod(in_dims) - x.shape[-1]))
    state = x.reshape(tokens, rest, in_dims[0]).mT if contiguous else x.reshape(tokens, in_dims[0], rest)
    states = [state]
    for factor, weight in zip(factors(in_dims, out_dims, weights), weights, strict=True):
        state = state.reshape(tokens, factor.done, factor.in_size, factor.rest)
        state = torch.einsum("tapc,acpq->taqc", state, weight.reshape(factor))
        states.append(state)
    return states


def monarch_linear_strided(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    out_features: int,
    contiguous: bool,
) -> Tensor:
    """Compute `monarch_linear` with ``bmm``, every factor writing where the next one reads."""
    y = x.new_empty((*x.shape[:-1], out_features))
    if y.numel() == 0:
        return y
    tokens = x.shape[:-1].numel()
    inputs = _strided_inputs(x, weights, in_dims, out_dims, contiguous)
    last = factors(in_dims, out_dims, weights)[-1]
    padded = y if out_features == prod(out_dims) else y.new_empty((tokens, prod(out_dims)))
    out = padded.view(tokens, last.done, 1, last.out_size).permute(1, 2, 0, 3)
    if bias is None:
        _batched_mm(inputs[-1], weights[-1].view(last), out)
    else:
        padded_bias = F.pad(bias, (0, prod(out_dims) - out_features)) if padded is not y else bias
        _batched_mm(inputs[-1], weights[-1].view(last), out, padded_bias.view(last.done, 1, 1, last.out_size))
    if padded is not y:
        y.view(tokens, out_features).copy_(padded[:, :out_features])
    return y


def monarch_linear_backward_strided(
    grad_out: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    contiguous: bool,
    need_x: bool,
    need_weights: bool,
    need_bias: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Compute the wanted gradients with ``bmm``; the inputs of the factors are computed again, not kept.

    A gradient that is not wanted comes back empty.
    """
    tokens, out_features = x.shape[:-1].numel(), grad_out.shape[-1]
    grad_out = grad_out.reshape(tokens, out_features)
    grad_bias = grad_out.sum(0) if need_bias else x.new_empty(0)
    if not need_x and not need_weights:
        return x.new_empty(0), [w.new_empty(0) for w in weights], grad_bias
    if x.numel() == 0 or out_features == 0:
        grads = [torch.zeros_like(w) if need_weights else w.new_empty(0) for w in weights]
        return x.new_zeros(x.shape if need_x else 0), grads, grad_bias
    sizes = factors(in_dims, out_dims, weights)
    inputs = _strided_inputs(x, weights, in_dims, out_dims, contiguous) if need_weights else []
    last = sizes[-1]
    grad = F.pad(grad_out, (0, prod(out_dims) - out_features)) if out_features != prod(out_dims) else grad_out
    grad = grad.view(tokens, last.done, 1, last.out_size).permute(1, 2, 0, 3)
    grad_weights = [torch.empty_like(w) if need_weights else w.new_empty(0) for w in weights]
    grad_x = x.new_empty(0)
    for k in reversed(range(len(weights))):
        if need_weights:
            _batched_mm(inputs[k].mT.conj(), grad, grad_weights[k].view(sizes[k]))
        if k == 0 and not need_x:
            break
        if k == 0 and contiguous:  # the groups of a token side by side, as in x
            out = x.new_empty((1, tokens, sizes[0].rest, in_dims[0])).transpose(1, 2)
        else:
            out = _middle(x, tokens, sizes[k])
        _batched_mm(grad, weights[k].view(sizes[k]).mT.conj(), out)
        if k > 0:
            grad = _as_output(out, sizes[k - 1])
        else:
            grad_x = _ungroup(out, contiguous)[:, : x.shape[-1]].contiguous().view(x.shape)
    return grad_x, grad_weights, grad_bias


def _strided_inputs(
    x: Tensor, weights: Sequence[Tensor], in_dims: Sequence[int], out_dims: Sequence[int], contiguous: bool
) -> list[Tensor]:
    """The input of every factor as a view (O_<k, I_>k, tokens, r_k * i_k)."""
    tokens = x.shape[:-1].numel()
    sizes = factors(in_dims, out_dims, weights)
    x = x.reshape(tokens, x.shape[-1])
    if x.shape[-1] != prod(in_dims):
        x = F.pad(x, (0, prod(in_dims) - x.shape[-1]))
    inputs = [_group(x, in_dims, contiguous)]
    for k in range(len(weights) - 1):
        inputs.append(_middle(x, tokens, sizes[k + 1]))
        _batched_mm(inputs[k], weights[k].view(sizes[k]), _as_output(inputs[-1], sizes[k]))
    return inputs


def _group(x: Tensor, in_dims: Sequence[int], contiguous: bool) -> Tensor:
    """View (tokens, features) as the input (1, I_>0, tokens, i_0) of the first factor.

    No BLAS reads features that are apart both within a block and from token to token, so "strided" costs one
    copy here; else ``bmm`` would make one for each block.
    """
    tokens, rest = x.shape[0], prod(in_dims[1:])
    if contiguous:
        return x.unflatten(1, (rest, in_dims[0])).transpose(0, 1).unsqueeze(0)
    return x.unflatten(1, (in_dims[0], rest)).permute(2, 0, 1).contiguous().view(1, rest, tokens, in_dims[0])


def _ungroup(grouped: Tensor, contiguous: bool) -> Tensor:
    """Turn the input (1, I_>0, tokens, i_0) of the first factor back into (tokens, features)."""
    return (grouped[0].transpose(0, 1) if contiguous else grouped[0].permute(1, 2, 0)).flatten(1)


def _middle(like: Tensor, tokens: int, reader: Factor) -> Tensor:
    """Allocate what lies between two factors, tokens last in memory, as the input view of its reader."""
    buffer = like.new_empty((reader.done, reader.in_size, reader.rest, tokens))
    return buffer.permute(0, 2, 3, 1)


def _as_output(middle: Tensor, writer: Factor) -> Tensor:
    """View the same memory as the output (O_<k, I_>k, tokens, o_k * r_(k+1)) of the factor before."""
    tokens = middle.shape[2]
    buffer = middle.permute(0, 3, 1, 2).view(writer.done, writer.out_size, writer.rest, tokens)
    return buffer.permute(0, 2, 3, 1)


def _batched_mm(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """``out = a @ b (+ bias)`` over two batch dims. ``bmm`` takes one, so the shorter is looped over."""
    loop = 0 if out.shape[0] <= out.shape[1] else 1
    for index in range(out.shape[loop]):
        a_i, b_i, out_i = a.select(loop, index), b.select(loop, index), out.select(loop, index)
        if bias is None:
            torch.bmm(a_i, b_i, out=out_i)
        else:
            torch.baddbmm(bias.select(loop, index if bias.shape[loop] > 1 else 0), a_i, b_i, out=out_i)
