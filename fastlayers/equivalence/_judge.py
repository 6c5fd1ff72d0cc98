"""The judge: is a result as accurate as the original's? No fixed tolerance.

Both results are compared with a float64 reference. A hard bound that follows from the arithmetic limits every
element; the new error, in units of what rounding can cause, is then judged against the original's own.
The constants stand here and nowhere else; `benchmarks/bench_judge.py` is the experiment that set them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._expected import Expected

RATIO_LIMIT = 3.0  # a pool's rms error may be this many times the original's, ...
SMALL_POOL = 3.0  # ... times (1 + SMALL_POOL / sqrt(m)): the rms of m errors is itself uncertain
ERROR_FLOOR = 0.05  # an original with an error below this (in units of `scale`) was lucky, not better
WALK_SHARE = 1.0 / 3.0  # naive summation in any order counts as accurate: floor = its random-walk error / 3
POOL_ELEMENTS = 16  # linears with fewer elements are pooled with their neighbours
SPIKE_LIMIT = 4.0  # one element may exceed its pool's limit, and the original's largest error, by this factor
TYPICAL_ROUNDING = (
    0.5  # where only values are known: an error of half a rounding of a typical element is none
)
TENSOR_BOUND = (
    16.0  # where no hard bound is known: this far beyond the limit is `different`, not less accurate
)


class Verdict(enum.IntEnum):
    """How a converted result compares with the original's, best first."""

    BITWISE = 0
    AS_ACCURATE = 1
    WITHIN_BOUND = 2
    DIFFERENT = 3

    def __str__(self) -> str:
        return _VERDICT_TEXT[self]


_VERDICT_TEXT = {
    Verdict.BITWISE: "bitwise",
    Verdict.AS_ACCURATE: "as accurate as the original",
    Verdict.WITHIN_BOUND: "within the bound but less accurate",
    Verdict.DIFFERENT: "different",
}


@dataclass(frozen=True)
class Judgement:
    """What the judge found about one tensor.

    `ratio`: the new error over the original's (rms, both in units of what rounding can cause), of the worst
    pool; `limit`: what it may be there. `bound_ratio`: the largest error over the hard bound (more than 1: a
    bug). `index`: the worst element, `linear`: the linear it belongs to; `result`, `original`, `reference`:
    its values.
    """

    name: str
    verdict: Verdict
    ratio: float = 0.0
    limit: float = math.inf
    bound_ratio: float = 0.0
    error_new: float = 0.0
    error_original: float = 0.0
    index: tuple[int, ...] | None = None
    linear: int | None = None
    of: str = ""
    result: float | None = None
    original: float | None = None
    reference: float | None = None
    reason: str = ""

    @property
    def severity(self) -> tuple[int, float]:
        """Sorts judgements from best to worst."""
        return int(self.verdict), max(self.ratio / self.limit, self.bound_ratio)

    def __str__(self) -> str:
        text = f"{self.name or 'tensor'}: {self.verdict}"
        if self.verdict == Verdict.BITWISE:
            return text
        text += f" (error {self.ratio:.3g} times the original's, limit {self.limit:.3g}"
        text += f"; {self.bound_ratio:.3g} of the hard bound)" if self.bound_ratio else ")"
        if self.index is not None:
            text += f"; worst element {list(self.index)}"
            text += f" of linear {self.linear}" if self.linear is not None else ""
            text += f" ({self.of})" if self.of else ""
            text += f": {_number(self.result)}, original {_number(self.original)}"
            text += f", float64 {_number(self.reference, 17)}"
        return text + (f"; {self.reason}" if self.reason else "")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number of `dtype` (u)."""
    return torch.finfo(dtype).eps / 2


def accumulator_roundoff(dtype: torch.dtype) -> float:
    """u of the type that sums of `dtype` are kept in: float32, or float64 for float64 (a)."""
    return unit_roundoff(torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32)


def smallest_step(dtype: torch.dtype) -> float:
    """The smallest positive number that arithmetic gives: subnormal, or normal when flushed to zero (eta)."""
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    kept = (
        torch.tensor(torch.finfo(torch.float32).smallest_normal, dtype=torch.float32).mul(0.5).item() != 0.0
    )
    return subnormal if kept or dtype == torch.float16 else info.smallest_normal


def judge(
    result: Tensor,
    original: Tensor,
    expected: Expected,
    *,
    original_expected: Expected | None = None,
    list_dim: int | None = None,
    name: str = "",
) -> Judgement:
    """Judge `result` against `original`, both of one floating dtype, by the float64 `expected`.

    Every element must keep the hard bound; then each linear along `list_dim` (pooled with neighbours where
    it has few elements; the whole tensor without `list_dim`) must be as accurate as the original. Where the
    expected value is not finite, or beyond the dtype's range, only the pattern of NaN and Inf must agree.
    `original_expected`: where the original was computed from other numbers, or only some of its linears were;
    its error is then taken as a whole.
    Raises TypeError or ValueError when dtypes or shapes differ.
    """
    _check(result, original, expected, original_expected or expected, name)
    result, original, list_dim = _as_real(result, original, list_dim)
    new = _Sample(result, expected, _sizes(result.dtype, expected), list_dim)
    if original_expected is None:
        old = _Sample(original, expected, _sizes(original.dtype, expected), list_dim)
    else:
        old = _Sample(original, original_expected, _sizes(original.dtype, original_expected), list_dim)
    return _judge(new, old, original_expected is None, name)


def judge_tensor(
    result: Tensor,
    original: Tensor,
    reference: Tensor,
    *,
    envelope: Tensor | float = 0.0,
    list_dim: int | None = None,
    name: str = "",
) -> Judgement:
    """Judge a tensor of which only a float64 `reference` is known, not how it was summed.

    Errors are counted in roundings of an element of typical size; `envelope` (a number or per element) is an
    error that counts as none: how much the original itself changes under one-ulp changes of its inputs.
    Beyond TENSOR_BOUND times what is allowed the verdict is `different`.
    """
    reference = reference.detach()
    reference = torch.view_as_real(reference) if reference.is_complex() else reference
    none = torch.zeros_like(reference, dtype=torch.float64)
    expected = Expected(reference.double(), none, none, 1)
    _check(result, original, expected, expected, name)
    result, original, list_dim = _as_real(result, original, list_dim)
    finite = torch.where(reference.isfinite(), expected.value, none).abs()
    dims = [d for d in range(finite.dim()) if list_dim is None or d != list_dim % finite.dim()]
    typical = finite.square().mean(dim=dims, keepdim=True).sqrt() if dims else finite
    scale = (
        unit_roundoff(result.dtype) * torch.maximum(finite, typical) + smallest_step(result.dtype) + envelope
    )
    sizes = _Sizes(torch.full_like(scale, math.inf), scale, TYPICAL_ROUNDING / WALK_SHARE * scale)
    new, old = (_Sample(t, expected, sizes, list_dim) for t in (result, original))
    return _judge(new, old, True, name)


def _judge(new: _Sample, old: _Sample, same_inputs: bool, name: str) -> Judgement:
    if new.tensor.numel() == 0 or (same_inputs and _same(new.tensor, old.tensor).all()):
        return Judgement(name, Verdict.BITWISE)
    pattern = _Pattern(new, old.tensor if same_inputs else None)
    error, old_error = new.error(pattern.numbers), old.error(old.tensor.isfinite())
    # The original defines what is allowed: where it leaves the bound, that is not about its arithmetic.
    over = error / (new.sizes.bound * max(1.0, _largest(old_error / old.sizes.bound)))
    over[pattern.wrong] = math.inf
    pools = _Pools(new, error, pattern.judged, old_error / old.sizes.scale, same_inputs)
    verdict, worst, reason = Verdict.AS_ACCURATE, pools.worst_element, ""
    if _largest(over) > 1.0:
        verdict, worst = Verdict.DIFFERENT, int(over.argmax())
        reason = "NaN or Inf differ" if pattern.wrong.any() else "beyond the hard bound"
    elif pools.excess > 1.0:
        unbounded = not bool(new.sizes.bound.isfinite().any())
        far = unbounded and pools.excess > TENSOR_BOUND
        verdict, reason = (Verdict.DIFFERENT if far else Verdict.WITHIN_BOUND), pools.reason
    row, position = divmod(worst, new.tensor.shape[1])
    return Judgement(
        name=name,
        verdict=verdict,
        ratio=pools.ratio,
        limit=pools.limit,
        bound_ratio=_largest(over),
        error_new=pools.error_new,
        error_original=pools.error_original,
        index=new.index(row, position),
        linear=None if new.dim is None else row,
        result=float(new.tensor[row, position]),
        original=float(old.tensor[row, position]) if same_inputs else None,
        reference=float(new.expected.value[row, position]),
        reason=reason,
    )


class _Sample:
    """A tensor with its expected value and sizes, all as (linears, elements)."""

    def __init__(self, tensor: Tensor, expected: Expected, sizes: _Sizes, list_dim: int | None) -> None:
        self.shape, self.dim = tensor.shape, None if list_dim is None else list_dim % tensor.dim()
        self.tensor = self._list_first(tensor)
        self.expected = expected.map(self._list_first)
        self.sizes = _Sizes(*(self._list_first(t) for t in (sizes.bound, sizes.scale, sizes.walk)))

    def _list_first(self, t: Tensor) -> Tensor:
        if self.dim is None:
            return t.detach().reshape(1, -1)
        return t.detach().movedim(self.dim, 0).reshape(t.shape[self.dim], -1)

    def error(self, where: Tensor) -> Tensor:
        """Distance from the expected value, 0 where it is not finite or not in `where`."""
        error = self.tensor.double() - self.expected.value
        if self.expected.low is not None:
            error = error - self.expected.low
        return torch.where(where & error.isfinite(), error.abs(), torch.zeros_like(error))

    def index(self, row: int, position: int) -> tuple[int, ...]:
        """The index, in the tensor's own shape, of an element."""
        dim = self.dim
        rest = list(self.shape) if dim is None else [*self.shape[:dim], *self.shape[dim + 1 :]]
        index: list[int] = []
        for size in reversed(rest):
            position, at = divmod(position, size)
            index.insert(0, at)
        if dim is not None:
            index.insert(dim, row)
        return tuple(index)


@dataclass(frozen=True)
class _Sizes:
    """Per element: the hard bound, the unit errors are counted in, and what naive summation loses (rms)."""

    bound: Tensor
    scale: Tensor
    walk: Tensor


def _sizes(dtype: torch.dtype, expected: Expected) -> _Sizes:
    u, a, n = unit_roundoff(dtype), accumulator_roundoff(dtype), expected.inner
    accumulator = torch.float64 if a < 2**-40 else torch.float32
    eta = smallest_step(dtype) + n * smallest_step(accumulator)
    absolute = expected.value.abs()
    # The intermediate results of several stages are rounded to the working dtype, each term once per stage.
    between = (expected.stages - 1) * u * expected.terms
    bound = n * a / (1 - min(n * a, 0.5)) * expected.terms * (1 + u) + u * absolute + eta + between
    # A sum kept in a accumulator of roundoff a makes at step k an error of variance <= (a S_k)^2 / 3, S_k the
    # sum so far. For terms in random order E[S_k^2] <= k/n squares + (k/n value)^2; summed over k = 1..n:
    walk = a * ((n / 2 * expected.squares + n / 3 * absolute.square()) / 3).sqrt()
    return _Sizes(bound, a * expected.terms + u * absolute + eta + between, walk)


class _Pattern:
    """Sorts elements into those whose numbers are judged and those of which only NaN and Inf are compared."""

    def __init__(self, new: _Sample, original: Tensor | None) -> None:
        result, value, sizes = new.tensor, new.expected.value, new.sizes
        # Without an original of the same inputs, the rounded float64 value says where NaN and Inf belong.
        original = value.to(result.dtype) if original is None else original
        largest = torch.finfo(result.dtype).max
        accumulator = torch.finfo(torch.float64 if result.dtype == torch.float64 else torch.float32).max
        margin = torch.where(sizes.bound.isfinite(), sizes.bound, sizes.scale)
        in_range = value.isfinite() & (value.abs() + margin <= largest)
        risky = value.isfinite() & (~in_range | (new.expected.terms > accumulator))
        agrees = _same_pattern(result, original) | _same_pattern(result, value.to(result.dtype))
        # A sum may overflow on the way to a value in range, in one order and not in another.
        overflowed = risky & ~result.isfinite()
        better = result.isfinite() & ~original.isfinite() & in_range
        self.judged = in_range & result.isfinite() & original.isfinite()
        self.wrong = ~(self.judged | agrees | overflowed | better)
        self.numbers = self.judged | better


class _Pools:
    """The rms errors of the linears, and the pool and element that are worst against their limit."""

    def __init__(
        self, new: _Sample, error: Tensor, judged: Tensor, old_error: Tensor, same_linears: bool
    ) -> None:
        error, walk = error / new.sizes.scale * judged, new.sizes.walk / new.sizes.scale
        rows, elements = error.shape
        pools = max(1, rows // max(1, -(-POOL_ELEMENTS // elements)))
        member = (torch.arange(rows, device=error.device) * pools).div(rows, rounding_mode="floor")
        count = _pool_sum(judged.double(), member, pools).clamp(min=1)

        def rms(t: Tensor) -> Tensor:
            return (_pool_sum(t.square() * judged, member, pools) / count).sqrt()

        overall = old_error.square().mean().sqrt()
        rms_new = rms(error)
        rms_old = rms(old_error) if same_linears else overall.expand(pools)
        floor = torch.maximum(rms_old, overall).clamp(min=ERROR_FLOOR)
        floor = torch.maximum(floor, rms(walk) * WALK_SHARE)
        ratio = rms_new / floor
        limit = RATIO_LIMIT * (1 + SMALL_POOL / count.sqrt())
        unit = torch.maximum(floor[member, None], walk * WALK_SHARE)
        allowed = torch.maximum(limit[member, None] * unit, old_error.max())
        spike = error / (SPIKE_LIMIT * allowed)
        at = int((ratio / limit).argmax())
        self.ratio, self.limit = float(ratio[at]), float(limit[at])
        self.error_new, self.error_original = float(rms_new[at]), float(rms_old[at])
        self.excess = self.ratio / self.limit
        self.worst_element = int(torch.where((member == at)[:, None], error, -1.0).argmax())
        self.reason = "" if self.excess <= 1.0 else "its error is larger than the original's"
        if _largest(spike) > max(1.0, self.excess):
            self.excess, self.worst_element = _largest(spike), int(spike.argmax())
            self.reason = "one element's error stands out"


def _pool_sum(t: Tensor, member: Tensor, pools: int) -> Tensor:
    return torch.zeros(pools, dtype=t.dtype, device=t.device).index_add_(0, member, t.sum(dim=1))


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _number(value: float | None, digits: int = 9) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _as_real(result: Tensor, original: Tensor, list_dim: int | None) -> tuple[Tensor, Tensor, int | None]:
    if not result.is_complex():
        return result, original, list_dim
    list_dim = list_dim - 1 if list_dim is not None and list_dim < 0 else list_dim
    return torch.view_as_real(result), torch.view_as_real(original), list_dim


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Equal, NaN like NaN, +0 like -0."""
    return (a == b) | (a.isnan() & b.isnan())


def _same_pattern(a: Tensor, b: Tensor) -> Tensor:
    infinite = a.isinf() & b.isinf() & (a.sign() == b.sign())
    return (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan()) | infinite


def _check(
    result: Tensor, original: Tensor, expected: Expected, original_expected: Expected, name: str
) -> None:
    label = name or "judge"
    if result.dtype != original.dtype:
        raise TypeError(
            f"{label}: result must have the original's dtype {original.dtype}, got {result.dtype}"
        )
    if not (result.is_floating_point() or result.is_complex()):
        raise TypeError(f"{label}: result must be floating or complex, got {result.dtype}")
    if expected is original_expected and result.shape != original.shape:
        shapes = f"{tuple(original.shape)}, got {tuple(result.shape)}"
        raise ValueError(f"{label}: result must have the original's shape {shapes}")
    for what, tensor, known in (("result", result, expected), ("original", original, original_expected)):
        shape = known.value.shape[:-1] if tensor.is_complex() else known.value.shape
        if tensor.shape != shape:
            shapes = f"{tuple(shape)}, got {tuple(tensor.shape)}"
            raise ValueError(f"{label}: {what} must have the reference's shape {shapes}")
