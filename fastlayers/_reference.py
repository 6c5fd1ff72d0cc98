"""Each op as its formula in plain PyTorch: the definition, the fallback and the oracle.

The functions named after an op are its definition: one einsum, differentiable as often as you like and
understood by every torch.func transform. The functions ending in ``_strided`` compute the same through
``baddbmm`` and ``bmm`` on strided views, without a copy of any input; they serve where no kernel is compiled.
"""

import torch
from torch import Tensor


def linear_list(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``y[..., n, :] = weight[n] @ x[..., n, :] + bias[n]``; an (*, 1, I) ``x`` is shared by all N."""
    x = x.expand(*x.shape[:-2], weight.shape[0], x.shape[-1])
    y = torch.einsum("...ni,noi->...no", x, weight)
    return y if bias is None else y + bias


def linear_list_backward(grad_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return grad_x, grad_weight and grad_bias of `linear_list`."""
    grad_x = torch.einsum("...no,noi->...ni", grad_out, weight.conj())
    if x.shape[-2] != weight.shape[0]:
        grad_x = grad_x.sum(-2, keepdim=True)
    x = x.expand(*x.shape[:-2], weight.shape[0], x.shape[-1])
    grad_weight = torch.einsum("...no,...ni->noi", grad_out, x.conj())
    return grad_x, grad_weight, grad_out.reshape(-1, *grad_out.shape[-2:]).sum(0)


def empty_channel_last(like: Tensor, lead: torch.Size, num_linears: int, features: int) -> Tensor:
    """Allocate (*lead, N, F) in memory order (*lead, F, N)."""
    return like.new_empty((*lead, features, num_linears)).transpose(-1, -2)


def is_channel_last(x: Tensor) -> bool:
    """Tell whether a (*, N, F) tensor lies in memory as (*, F, N) and not as (*, N, F)."""
    return not x.is_contiguous() and x.transpose(-1, -2).is_contiguous()


def linear_list_strided(x: Tensor, weight: Tensor, bias: Tensor | None, out_channel_last: bool) -> Tensor:
    """Compute `linear_list` with one ``baddbmm`` that writes the result where it belongs."""
    (num_linears, out_features, _), lead = weight.shape, x.shape[:-2]
    if out_channel_last:
        out = empty_channel_last(x, lead, num_linears, out_features)
    else:
        out = x.new_empty((*lead, num_linears, out_features))
    if out.numel() == 0:
        return out
    x_nbi, out_nbo = _list_first(x, num_linears), _list_first(out, num_linears)
    if bias is None:
        torch.bmm(x_nbi, weight.mT, out=out_nbo)
    else:
        torch.baddbmm(bias.unsqueeze(1), x_nbi, weight.mT, out=out_nbo)
    return out


def linear_list_backward_strided(
    grad_out: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the wanted ones of grad_x, grad_weight and grad_bias; the others come back empty."""
    (num_linears, _, in_features), lead = weight.shape, x.shape[:-2]
    grad_x = grad_weight = grad_bias = None
    grad_nbo = _list_first(grad_out, num_linears)
    if need_x:
        if is_channel_last(x):
            grad_x = empty_channel_last(x, lead, x.shape[-2], in_features)
        else:
            grad_x = x.new_empty(x.shape)
        if x.shape[-2] == num_linears:
            torch.bmm(grad_nbo, weight.conj(), out=_list_first(grad_x, num_linears))
        else:  # one sum over the list and the features, kept in the accumulator's precision
            both = weight.conj().reshape(-1, in_features)
            torch.mm(grad_out.reshape(-1, both.shape[0]), both, out=grad_x.view(-1, in_features))
    if need_weight:
        grad_weight = torch.bmm(grad_nbo.mT, _list_first(x, num_linears).conj())
    if need_bias:
        grad_bias = grad_nbo.sum(1)
    return tuple(x.new_empty(0) if g is None else g for g in (grad_x, grad_weight, grad_bias))  # type: ignore[return-value]


def _list_first(t: Tensor, num_linears: int) -> Tensor:
    """View (*, N, F) or (*, 1, F) as (N, B, F), where B is all leading dimensions together."""
    t = t.expand(*t.shape[:-2], num_linears, t.shape[-1])
    return (
        t.movedim(-2, 0).reshape(num_linears, -1, t.shape[-1])
        if t.numel()
        else t.new_empty((num_linears, t.shape[:-2].numel(), t.shape[-1]))
    )
