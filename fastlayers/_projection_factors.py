"""Dense weight -> Monarch factors by splitting off one factor after another, and by sweeps over pairs.

Every output group o_0 is a problem of its own, so a few groups at a time are in memory. Within a group the
state after k factors is the tensor (O_<k, O_>=k, r_k * i_k, I_>k) of what is left to be represented;
splitting factor k off is a batch of truncated SVDs, one for each (O_<=k, I_>k), with rows O_>k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from . import _projection_blocks as blocks


@dataclass(frozen=True)
class Fit:
    """Factors in float64, the Frobenius error they leave, and a certified lower bound of any factors'."""

    weights: list[Tensor]
    error: float
    least_error: float


def fit_weight(
    weight: Tensor,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    rank: int,
    grouping: str,
    sweeps: int = 3,
) -> Fit:
    """The factors nearest to a weight (out_features, in_features), in the Frobenius norm.

    For two dims the global optimum. For more, hierarchical: at most sqrt(N - 1) times the optimum, then
    lowered by `sweeps` sweeps of optimal pairs.
    """
    count = len(in_dims)
    target = blocks.padded(weight, prod(out_dims), prod(in_dims))
    dtype = blocks.wide(weight.dtype)
    ranks = [1, *[rank] * (count - 1), 1]
    weights = [
        weight.new_zeros(
            (prod(out_dims[:k]) * prod(in_dims[k + 1 :]), ranks[k] * in_dims[k], out_dims[k] * ranks[k + 1]),
            dtype=dtype,
        )
        for k in range(count)
    ]
    rows = prod(out_dims[1:])
    groups = list(blocks.chunks(out_dims[0], rows * prod(in_dims)))
    squares = [0.0] * len(groups)
    least = [0.0] * len(groups)

    def work(part: slice) -> None:
        index = groups.index(part)
        state = _input_first(target[part.start * rows : part.stop * rows], in_dims, grouping)
        inner_out = [part.stop - part.start, *out_dims[1:]]
        if count == 2:
            block = blocks.widened(state.view(*inner_out, *state.shape[1:]).permute(0, 3, 1, 2))
            left, right = blocks.truncate(block, rank)
            squares[index] = least[index] = blocks.residual(block, left, right)
            cores = _cores_of(left, right)
        else:
            state = state.to(dtype)
            cores, least[index] = _split(state.unsqueeze(0), in_dims, inner_out, ranks)
            for _ in range(sweeps):
                cores = _sweep(state.unsqueeze(0), cores, in_dims, inner_out, ranks)
            squares[index] = _error(state, cores, in_dims, inner_out)
        _put(weights, _balanced(cores, in_dims, inner_out, ranks), part, out_dims, ranks)

    blocks.in_threads(work, groups)
    return Fit(weights, sqrt(sum(squares)), min(sqrt(sum(least)), sqrt(sum(squares))))


def _cores_of(left: Tensor, right: Tensor) -> list[Tensor]:
    """U (o_0, i_1, o_1, R) and V (o_0, i_1, R, i_0) as the two cores of `_split`."""
    first = right.permute(1, 3, 0, 2).unsqueeze(0)  # (1, i_1, i_0, o_0, R)
    second = left.permute(0, 3, 1, 2).flatten(1, 2)  # (o_0, R * i_1, o_1)
    return [first, second[:, None, :, :, None]]


def _input_first(rows: Tensor, in_dims: Sequence[int], grouping: str) -> Tensor:
    """(R, in) as (R, i_0, I_>0)."""
    rest = prod(in_dims[1:])
    if grouping == "contiguous":
        return rows.view(-1, rest, in_dims[0]).mT
    return rows.view(-1, in_dims[0], rest)


def _split(
    state: Tensor, in_dims: Sequence[int], out_dims: Sequence[int], ranks: Sequence[int]
) -> tuple[list[Tensor], float]:
    """Split off factor after factor. Cores are (O_<k, I_>k, r_k * i_k, o_k, r_(k+1)).

    The energy that one step discards bounds the optimum from below: projections keep the structure.
    """
    cores = []
    lost = [state.new_zeros(out_dims[0], dtype=torch.float64)]
    for k in range(len(in_dims) - 1):
        done, after = prod(out_dims[:k]), prod(out_dims[k + 1 :])
        rest = prod(in_dims[k + 1 :])
        state = state.reshape(done, out_dims[k], after, ranks[k] * in_dims[k], rest)
        block = state.permute(0, 1, 4, 2, 3)  # (done, o_k, rest, after, r_k i_k)
        left, right = blocks.truncate(block, ranks[k + 1])
        energy = block.abs().square().sum((-1, -2)) - left.abs().square().sum((-1, -2))
        lost.append(energy.clamp_min(0).reshape(out_dims[0], -1).sum(1))
        cores.append(right.permute(0, 2, 4, 1, 3))  # (done, rest, r_k i_k, o_k, r)
        state = _next_state(left, in_dims, k)
    last = state.reshape(prod(out_dims[:-1]), out_dims[-1], ranks[-2] * in_dims[-1], 1)
    cores.append(last.permute(0, 3, 2, 1).unsqueeze(-1))
    return cores, float(torch.stack(lost).amax(0).sum())


def _next_state(left: Tensor, in_dims: Sequence[int], k: int) -> Tensor:
    """Coefficients (done, o_k, I_>k, O_>k, r) as the next state (done * o_k, O_>k, r * i_(k+1), I_>k+1)."""
    done, out, _, after, rank = left.shape
    left = left.reshape(done * out, in_dims[k + 1], -1, after, rank)
    return left.permute(0, 3, 4, 1, 2).reshape(done * out, after, rank * in_dims[k + 1], -1)


def _sweep(
    target: Tensor,
    cores: list[Tensor],
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    ranks: Sequence[int],
) -> list[Tensor]:
    """Solve every pair of neighbours exactly, from the last to the first and back.

    On entry all cores but the last are orthonormal towards the input, and so they are on return.
    """
    count = len(cores)
    cores = list(cores)
    states = [target]
    for k in range(count - 2):
        states.append(_project_left(states[k], cores[k], in_dims, out_dims, ranks, k))
    for k in range(count - 2, 0, -1):
        cores[k], cores[k + 1] = _solve_pair(states[k], cores, in_dims, out_dims, ranks, k, rightwards=False)
    for k in range(count - 1):
        cores[k], cores[k + 1] = _solve_pair(states[k], cores, in_dims, out_dims, ranks, k, rightwards=True)
        if k + 1 < count - 1:
            states[k + 1] = _project_left(states[k], cores[k], in_dims, out_dims, ranks, k)
    return cores


def _project_left(
    state: Tensor,
    core: Tensor,
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    ranks: Sequence[int],
    k: int,
) -> Tensor:
    done, after, rest = prod(out_dims[:k]), prod(out_dims[k + 1 :]), prod(in_dims[k + 1 :])
    state = state.reshape(done, out_dims[k], after, ranks[k] * in_dims[k], rest)
    return _next_state(torch.einsum("doamc,dcmor->docar", state, core.conj()), in_dims, k)


def _solve_pair(
    state: Tensor,
    cores: list[Tensor],
    in_dims: Sequence[int],
    out_dims: Sequence[int],
    ranks: Sequence[int],
    k: int,
    rightwards: bool,
) -> tuple[Tensor, Tensor]:
    """The best cores k and k + 1 while the others stay; they are orthonormal away from the pair."""
    count = len(cores)
    size = ranks[k] * in_dims[k]
    # Contract the cores behind the pair: (O_<j, o_j * r_(j+1), X, i_j, I_>j) -> (O_<j, r_j, X, i_j, I_>j).
    pair = state.reshape(prod(out_dims[:k]), prod(out_dims[k:]), size, prod(in_dims[k + 1 :]))
    for j in range(count - 1, k + 1, -1):
        done, between = prod(out_dims[:j]), prod(in_dims[k + 1 : j])
        pair = pair.reshape(
            done, out_dims[j] * ranks[j + 1], size * between, in_dims[j], prod(in_dims[j + 1 :])
        )
        core = cores[j].reshape(
            done, prod(in_dims[j + 1 :]), ranks[j], in_dims[j], out_dims[j] * ranks[j + 1]
        )
        pair = torch.einsum("dsxic,dcris->drxic", pair, core.conj())
    done, rest = prod(out_dims[:k]), prod(in_dims[k + 2 :])
    columns = out_dims[k + 1] * ranks[k + 2]
    pair = pair.reshape(done, out_dims[k], columns, size, in_dims[k + 1], rest)
    matrix = pair.permute(0, 1, 4, 5, 2, 3)  # (done, o_k, i_(k+1), rest, columns, size)
    if rightwards:  # core k orthonormal over its input
        left, right = blocks.truncate(matrix, ranks[k + 1])
    else:  # core k + 1 orthonormal over its output
        turned, transposed = blocks.truncate(matrix.mT, ranks[k + 1])
        left, right = transposed.mT, turned.mT
    first = right.permute(0, 2, 3, 5, 1, 4).flatten(1, 2)  # (done, I_>k, size, o_k, r)
    second = left.permute(0, 1, 3, 5, 2, 4)  # (done, o_k, rest, r, i_(k+1), columns)
    second = second.reshape(done * out_dims[k], rest, ranks[k + 1] * in_dims[k + 1], out_dims[k + 1], -1)
    return first, second


def _error(state: Tensor, cores: list[Tensor], in_dims: Sequence[int], out_dims: Sequence[int]) -> float:
    """Squared error of the product of the cores; state is (rows, i_0, I_>0)."""
    # Multiply from the last core down: (O_<k, O_>=k, r_k, i_k, I_>k).
    product: Tensor | None = None
    for k in reversed(range(len(cores))):
        done, rest, size, out, rank = cores[k].shape
        if product is None:
            product = cores[k].permute(0, 3, 4, 2, 1).reshape(done, out * rank, size, rest)
            continue
        after = product.shape[1]
        product = product.reshape(done, out, after, rank, rest)
        product = torch.einsum("doarc,dcmor->doamc", product, cores[k]).reshape(done, out * after, size, rest)
        if k > 0:  # r_k * i_k with I_>k behind: bring i_k and I_>k together
            r = size // in_dims[k]
            product = product.reshape(done, out * after, r, in_dims[k] * rest)
    assert product is not None
    return float((state - product.reshape(state.shape)).abs().square().sum())


def _balanced(
    cores: list[Tensor], in_dims: Sequence[int], out_dims: Sequence[int], ranks: Sequence[int]
) -> list[Tensor]:
    """Move the norms between neighbours until each rank's two sides weigh the same."""
    cores = list(cores)
    for k in range(len(cores) - 1):
        done, rest, size, out, rank = cores[k].shape
        behind = cores[k + 1].reshape(done, out, rest // in_dims[k + 1], rank, in_dims[k + 1], -1)
        behind = behind.permute(0, 1, 4, 2, 5, 3)  # (done, o_k, i_(k+1), rest', columns, r)
        here = cores[k].reshape(done, in_dims[k + 1], -1, size, out, rank).permute(0, 4, 1, 2, 5, 3)
        behind, here = blocks.balance(behind, here)
        cores[k] = here.permute(0, 2, 3, 5, 1, 4).reshape(done, rest, size, out, rank)
        second = behind.permute(0, 1, 3, 5, 2, 4)
        cores[k + 1] = second.reshape(cores[k + 1].shape)
    return cores


def _put(
    weights: list[Tensor], cores: list[Tensor], part: slice, out_dims: Sequence[int], ranks: Sequence[int]
) -> None:
    """Write the cores of some output groups into the factors of all."""
    first = weights[0].view(cores[0].shape[1], cores[0].shape[2], out_dims[0], ranks[1])
    first[:, :, part] = cores[0][0]
    for k in range(1, len(cores)):
        each = weights[k].shape[0] // out_dims[0]
        core = cores[k].reshape(-1, *weights[k].shape[1:])
        weights[k][part.start * each : part.stop * each] = core
