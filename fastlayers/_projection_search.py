"""Which grid of blocks, which grouping and which rank, by errors that are known before anything is built."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan, prod, sqrt

import torch
from torch import Tensor

from . import _projection_blocks as blocks
from ._projection_data import OutputFit, output_energy, parameters_of
from ._projection_factors import fit_weight

GRID = (1, 2, 4, 8, 16, 32, 64)  # output groups a and input groups b that are tried
_MOST_PADDING = 1.02  # features with padding, over those without
_NEAR = 1.1  # estimated times within this of the least count as equally fast
_FLOP_PER_BYTE = 6.0  # what a CPU computes while it moves a byte, for the estimate of time


@dataclass(frozen=True)
class Choice:
    """Sizes of a layer, and its relative error: of the weight, or (data-aware) of the output as estimated.

    NaN where there was nothing to choose from.
    """

    in_dims: tuple[int, ...]
    out_dims: tuple[int, ...]
    rank: int
    grouping: str
    error: float

    @property
    def parameters(self) -> int:
        return parameters_of(self.in_dims, self.out_dims, self.rank)


def grids(in_features: int, out_features: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The two-dim grids worth trying: every a and b in GRID whose padding is small."""
    for a in GRID:
        for b in GRID:
            i0, o1 = -(-in_features // b), -(-out_features // a)
            few = i0 * b > _MOST_PADDING * in_features or a * o1 > _MOST_PADDING * out_features
            if a <= out_features and b <= in_features and not few:
                yield (i0, b), (a, o1)


def largest_rank(in_dims: Sequence[int], out_dims: Sequence[int]) -> int:
    """The rank from which on any weight is represented exactly."""
    return max(min(prod(in_dims[: k + 1]), prod(out_dims[k + 1 :])) for k in range(len(in_dims) - 1))


def rank_for_parameters(in_dims: Sequence[int], out_dims: Sequence[int], most: float) -> int:
    """The largest rank with at most that many parameters; 0 when rank 1 has more."""
    low, high = 0, largest_rank(in_dims, out_dims)
    while low < high:
        middle = (low + high + 1) // 2
        if parameters_of(in_dims, out_dims, middle) <= most:
            low = middle
        else:
            high = middle - 1
    return low


def time_estimate(choice: Choice) -> float:
    """Of one token, in arbitrary units: arithmetic, and the bytes of input, output and twice the middle."""
    middle = sum(
        prod(choice.out_dims[:k]) * choice.rank * prod(choice.in_dims[k:])
        for k in range(1, len(choice.in_dims))
    )
    moved = 4 * (prod(choice.in_dims) + 2 * middle + prod(choice.out_dims))
    return 2 * choice.parameters + _FLOP_PER_BYTE * moved


@dataclass(frozen=True)
class Costs:
    """What a CPU needs, for the estimate of gain: measured on 2 cores with AVX-512, float32."""

    dense_flop_per_ns: float = 150.0
    monarch_flop_per_ns: float = 90.0
    bytes_per_ns: float = 8.0
    dense_call_ns: float = 6_000.0
    monarch_call_ns: float = 25_000.0


def estimated_gain(choice: Choice, in_features: int, out_features: int, tokens: int) -> float:
    """Time of the dense layer over the Monarch layer's, for a forward of that many tokens."""
    costs = Costs()
    ends = 4 * tokens * (in_features + out_features)
    dense = in_features * out_features
    before = costs.dense_call_ns + 2 * tokens * dense / costs.dense_flop_per_ns
    before += (4 * dense + ends) / costs.bytes_per_ns
    after = costs.monarch_call_ns + 2 * tokens * choice.parameters / costs.monarch_flop_per_ns
    after += (4 * choice.parameters + ends) / costs.bytes_per_ns
    return before / after


class Errors:
    """Relative errors of one weight on one grid, at any rank. With a Gram matrix, of the output."""

    def __init__(
        self,
        weight: Tensor,
        gram: Tensor | None,
        in_dims: Sequence[int],
        out_dims: Sequence[int],
        grouping: str,
    ) -> None:
        self.weight, self.gram, self.grouping = weight, gram, grouping
        self.in_dims, self.out_dims = tuple(in_dims), tuple(out_dims)
        self.whole = float(torch.linalg.vector_norm(weight, dtype=blocks.wide(weight.dtype)).square())
        if gram is not None:
            self.whole = output_energy(weight, gram)
        self._tails: list[float] | None = None

    def of(self, rank: int) -> float:
        """The error at a rank: exact for a weight on two dims; block-whitened, an estimate, for outputs."""
        if self.whole == 0:
            return 0.0
        if len(self.in_dims) > 2:
            fit = fit_weight(self.weight, self.in_dims, self.out_dims, rank, self.grouping)
            return fit.error / sqrt(self.whole)
        tails = self._all_tails()
        return sqrt(tails[min(rank, len(tails) - 1)] / self.whole)

    def least_rank(self, tolerance: float) -> int:
        """The least rank whose error is at most the tolerance."""
        low, high = 1, largest_rank(self.in_dims, self.out_dims)
        while low < high:
            middle = (low + high) // 2
            if self.of(middle) <= tolerance:
                high = middle
            else:
                low = middle + 1
        return low

    def _all_tails(self) -> list[float]:
        if self._tails is None:
            each = self._energies()
            tails = each.flip(0).cumsum(0).flip(0)
            self._tails = [*tails.tolist(), 0.0]
        return self._tails

    def _energies(self) -> Tensor:
        """Squared singular values by their place, summed over the blocks: one batched eigvalsh."""
        if self.gram is not None:
            return OutputFit(self.weight, self.gram, self.in_dims, self.out_dims, self.grouping).energies()
        target = blocks.padded(self.weight, prod(self.out_dims), prod(self.in_dims))
        block = blocks.grid(target, self.in_dims, self.out_dims, self.grouping)
        parts = list(blocks.chunks(block.shape[0], block[0].numel()))
        sums: list[Tensor | None] = [None] * len(parts)

        def work(part: slice) -> None:
            sums[parts.index(part)] = blocks.energies(blocks.widened(block[part])).sum((0, 1))

        blocks.in_threads(work, parts)
        return torch.stack([s for s in sums if s is not None]).sum(0)


def search(
    weight: Tensor,
    gram: Tensor | None,
    dims: tuple[Sequence[int], Sequence[int]] | None,
    groupings: Sequence[str],
    *,
    rank: int | None = None,
    most_parameters: float | None = None,
    tolerance: float | None = None,
) -> list[Choice]:
    """Every grid with its rank and error, best first: the least error among the nearly fastest.

    One of `rank`, `most_parameters` and `tolerance` sets the rank. Grids that cannot keep it are left out.
    """
    out_features, in_features = weight.shape
    sizes = [dims] if dims is not None else list(grids(in_features, out_features))
    alone = len(sizes) * len(groupings) == 1  # nothing to compare: the error need not be known
    found = []
    for in_dims, out_dims in sizes:
        for grouping in groupings:
            if grouping == "contiguous" and "strided" in groupings and in_dims[1:] == (1,):
                continue  # one input group: the same matrix
            errors = Errors(weight, gram, in_dims, out_dims, grouping)
            if tolerance is not None:
                chosen = errors.least_rank(tolerance)
            elif most_parameters is not None:
                chosen = rank_for_parameters(in_dims, out_dims, most_parameters)
            else:
                chosen = 1 if rank is None else rank
            if chosen > 0:
                error = nan if alone and tolerance is None else errors.of(chosen)
                found.append(Choice(tuple(in_dims), tuple(out_dims), chosen, grouping, error))
    if not found:
        return []
    fastest = min(time_estimate(c) for c in found)
    near = [c for c in found if time_estimate(c) <= _NEAR * fastest]
    far = [c for c in found if time_estimate(c) > _NEAR * fastest]
    near.sort(key=lambda c: (c.error, c.out_dims[0] * c.in_dims[-1]))
    return [*near, *sorted(far, key=time_estimate)]
