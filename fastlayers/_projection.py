"""Dense weight -> Monarch factors: what `MonarchLinear.from_linear` does, and the record that it leaves."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from . import _monarch_ops, ops
from . import _projection_blocks as blocks
from ._monarch_linear import MonarchLinear
from ._projection_data import OutputFit, gram_of, output_energy, output_error, parameters_of
from ._projection_factors import fit_weight
from ._projection_search import Choice, largest_rank, search


@dataclass(frozen=True)
class Projection:
    """How a MonarchLinear was obtained from a dense one. Errors are relative: ||W - M|| / ||W||."""

    in_dims: tuple[int, ...]
    out_dims: tuple[int, ...]
    rank: int
    grouping: str
    method: str  # "optimal blocks", "hierarchical, with sweeps" or "data-aware"
    weight_error: float  # Frobenius
    output_error: float | None  # root mean square over the calibration inputs; None without any
    best_possible: float | None  # certified: no factors of these sizes have a smaller weight error
    parameters_before: int
    parameters_after: int
    time_s: float

    def __str__(self) -> str:
        share = self.parameters_after / self.parameters_before
        text = f"{self.in_dims} -> {self.out_dims}, rank {self.rank}, {self.grouping}"
        text += f": {share:.1%} of the parameters"
        if self.output_error is not None:
            text += f", output error {self.output_error:.4f}"
        return f"{text}, weight error {self.weight_error:.4f} ({self.method})"


def project(
    linear: nn.Linear,
    *,
    in_dims: Sequence[int] | None = None,
    out_dims: Sequence[int] | None = None,
    rank: int | None = None,
    params: float | None = None,
    weight_tolerance: float | None = None,
    output_tolerance: float | None = None,
    calibration: Tensor | Iterable[Tensor] | None = None,
    gram: Tensor | None = None,
    grouping: str | None = "strided",
    weight_only: bool = False,
) -> MonarchLinear:
    """See `MonarchLinear.from_linear`. With `weight_only` the inputs serve to measure, not to fit."""
    start = time.perf_counter()
    dims = _check(linear, in_dims, out_dims, rank, params, weight_tolerance, output_tolerance, grouping)
    if calibration is not None and gram is not None:
        raise ValueError("from_linear: calibration and gram say the same thing: give one of them")
    if output_tolerance is not None and calibration is None and gram is None:
        raise ValueError("from_linear: output_tolerance needs calibration inputs, or their gram")
    weight = linear.weight.detach()
    if calibration is not None:
        gram = gram_of(calibration, linear.in_features)
    if gram is not None:
        if tuple(gram.shape) != (linear.in_features, linear.in_features):
            raise ValueError(
                f"from_linear: gram must be ({linear.in_features}, {linear.in_features}),"
                f" got {tuple(gram.shape)}"
            )
        gram = gram.to(device=weight.device, dtype=blocks.wide(weight.dtype))
    weight_only = weight_only or weight_tolerance is not None or (dims is not None and len(dims[0]) > 2)
    aware = None if weight_only else gram
    tolerance = weight_tolerance if weight_tolerance is not None else output_tolerance
    choices = search(
        weight,
        aware,
        dims,
        _monarch_ops.GROUPINGS if grouping is None else (grouping,),
        rank=rank,
        most_parameters=None if params is None else params * weight.numel(),
        tolerance=tolerance,
    )
    if not choices:
        raise ValueError(
            f"from_linear: no Monarch layer of {linear.in_features} -> {linear.out_features} has at most"
            f" {params:.2%} of its {weight.numel()} parameters"
        )
    with _Progress(linear) as progress:
        choice, weights, loss = _fit(weight, aware, choices[0], output_tolerance, progress)
    return _layer(linear, weights, choice, gram, loss, aware is not None, start)


def _check(
    linear: nn.Linear,
    in_dims: Sequence[int] | None,
    out_dims: Sequence[int] | None,
    rank: int | None,
    params: float | None,
    weight_tolerance: float | None,
    output_tolerance: float | None,
    grouping: str | None,
) -> tuple[Sequence[int], Sequence[int]] | None:
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"from_linear: linear must be an nn.Linear, got {type(linear).__name__}")
    if grouping is not None and grouping not in _monarch_ops.GROUPINGS:
        raise ValueError(
            f'from_linear: grouping must be "strided", "contiguous" or None (the better), got {grouping!r}'
        )
    wishes = {
        "rank": rank,
        "params": params,
        "weight_tolerance": weight_tolerance,
        "output_tolerance": output_tolerance,
    }
    given = [name for name, value in wishes.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"from_linear: {' and '.join(given)} each set the rank: give one of them")
    for name in given:
        value = wishes[name]
        assert value is not None
        if value <= 0 or (name == "rank" and value != int(value)):
            raise ValueError(f"from_linear: {name} must be positive, got {value!r}")
    if (in_dims is None) != (out_dims is None):
        raise ValueError("from_linear: give in_dims and out_dims, or neither")
    if in_dims is None or out_dims is None:
        if not given:
            raise ValueError(f"from_linear: say how small or how exact: {', '.join(wishes)}, or the dims")
        return None
    _monarch_ops.check_dims("from_linear", in_dims, out_dims)
    return tuple(in_dims), tuple(out_dims)


def _fit(
    weight: Tensor, gram: Tensor | None, choice: Choice, output_tolerance: float | None, progress: "_Progress"
) -> tuple[Choice, list[Tensor], float]:
    """The factors of a choice; where an output tolerance is given, at the least rank that really keeps it."""
    if gram is None:
        progress.show("fitting")
        fit = fit_weight(weight, choice.in_dims, choice.out_dims, choice.rank, choice.grouping)
        return choice, fit.weights, fit.least_error
    data = OutputFit(weight, gram, choice.in_dims, choice.out_dims, choice.grouping)
    if output_tolerance is None:
        progress.show("fitting to the inputs")
        weights, loss = data.fit(choice.rank)
        return choice, weights, loss
    whole = output_energy(weight, gram)
    most = largest_rank(choice.in_dims, choice.out_dims)
    fits: dict[int, tuple[list[Tensor], float]] = {}

    def keeps(rank: int) -> bool:
        progress.show(f"rank {rank}")
        fits[rank] = data.fit(rank)
        # The damping that makes the Gram matrix regular counts as error: the true one is not larger.
        return fits[rank][1] <= output_tolerance**2 * whole

    low, high = 1, min(choice.rank, most)  # the estimate is of blocks that do not know of each other
    while high < most and not keeps(high):
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle + 1
    if high not in fits:
        keeps(high)
    weights, loss = fits[high]
    error = sqrt(max(loss, 0.0) / whole) if whole > 0 else 0.0
    return Choice(choice.in_dims, choice.out_dims, high, choice.grouping, error), weights, loss


def _layer(
    linear: nn.Linear,
    weights: list[Tensor],
    choice: Choice,
    gram: Tensor | None,
    bound: float,
    data_aware: bool,
    start: float,
) -> MonarchLinear:
    """Build the layer and record what was lost, measured on the factors as they are stored."""
    weight = linear.weight.detach()
    layer = nn.utils.skip_init(
        MonarchLinear,
        linear.in_features,
        linear.out_features,
        choice.in_dims,
        choice.out_dims,
        bias=linear.bias is not None,
        rank=choice.rank,
        grouping=choice.grouping,
        device=weight.device,
        dtype=weight.dtype,
    )
    assert isinstance(layer, MonarchLinear)
    with torch.no_grad():
        for parameter, factor in zip(layer.weights, weights, strict=True):
            parameter.copy_(factor)
        if layer.bias is not None:
            layer.bias.copy_(linear.bias)
        layer.requires_grad_(linear.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        whole, lost = _norms(weight, layer)
    method = "optimal blocks" if len(choice.in_dims) == 2 else "hierarchical, with sweeps"
    layer.projection = Projection(
        choice.in_dims,
        choice.out_dims,
        choice.rank,
        choice.grouping,
        "data-aware" if data_aware else method,
        lost / whole if whole > 0 else 0.0,
        None if gram is None else output_error(weight, layer.to_dense().detach(), gram),
        None if data_aware else (bound / whole if whole > 0 else 0.0),
        weight.numel(),
        parameters_of(choice.in_dims, choice.out_dims, choice.rank),
        time.perf_counter() - start,
    )
    return layer.train(linear.training)


def _norms(weight: Tensor, layer: MonarchLinear) -> tuple[float, float]:
    """Frobenius norms of W and of W - M, some columns at a time."""
    dtype = blocks.wide(weight.dtype)
    step = max(1, (4 << 20) // weight.shape[0])
    whole = lost = 0.0
    for start in range(0, weight.shape[1], step):
        columns = weight[:, start : start + step]
        unit = columns.new_zeros((columns.shape[1], weight.shape[1]))
        unit[:, start : start + columns.shape[1]].fill_diagonal_(1)
        made = ops.monarch_linear(
            unit,
            list(layer.weights),
            in_dims=layer.in_dims,
            out_dims=layer.out_dims,
            out_features=layer.out_features,
            grouping=layer.grouping,
        ).T
        whole += float(torch.linalg.vector_norm(columns.to(dtype)).square())
        lost += float(torch.linalg.vector_norm(columns.to(dtype) - made).square())
    return sqrt(whole), sqrt(lost)


class _Progress:
    """A line on a terminal that says what is being fitted; nothing where there is no terminal."""

    def __init__(self, linear: nn.Linear) -> None:
        self._on = sys.stderr.isatty()
        self._name = f"projecting {linear.in_features} -> {linear.out_features}"

    def show(self, text: str) -> None:
        if self._on:
            print(f"\r\x1b[K{self._name}: {text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
