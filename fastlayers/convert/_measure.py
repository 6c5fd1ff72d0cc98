"""Time what a conversion gains: each fused layer against the loop it replaced, and the whole model."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._linear_list import LinearList
from ._observe import copy_tensors, run_example
from ._program import tensors_in
from ._types import Rewrite


@dataclass(frozen=True)
class Time:
    """Milliseconds of one thing before and after: medians of interleaved runs, with quartiles."""

    name: str
    before_ms: float
    after_ms: float
    before_spread: tuple[float, float]
    after_spread: tuple[float, float]

    @property
    def gain(self) -> float:
        """How many times faster it is now."""
        return self.before_ms / self.after_ms


@dataclass(frozen=True)
class Measurement:
    """Times of a conversion: of the forward of each fused layer, and of the whole model."""

    layers: tuple[Time, ...]
    forward: Time
    training_step: Time


def measure(
    original: nn.Module,
    converted: nn.Module,
    rewrites: Sequence[Rewrite],
    example_inputs: Any,
    seconds: float = 1.0,
) -> Measurement:
    """Time both models, interleaved, about ``seconds`` for each thing; neither is changed.

    A training step is forward, backward of the mean square of all outputs, and Adam's step.
    """
    original, converted = copy.deepcopy(original), copy.deepcopy(converted)
    layers = _layer_inputs(converted, rewrites, example_inputs)
    times = [
        compare(r.into, _loop(original, r, x), _layer(converted, r, x), seconds)
        for r, x in zip(rewrites, layers, strict=True)
        if x is not None
    ]
    with torch.no_grad():
        forward = compare(
            "whole model, forward",
            lambda: run_example(original, copy_tensors(example_inputs)),
            lambda: run_example(converted, copy_tensors(example_inputs)),
            seconds,
        )
    step = compare(
        "whole model, training step",
        training_step(original, example_inputs),
        training_step(converted, example_inputs),
        seconds,
    )
    return Measurement(tuple(times), forward, step)


def compare(name: str, before: Callable[[], Any], after: Callable[[], Any], seconds: float) -> Time:
    """Run two things in turn, at least 5 times each, and take medians."""
    before()
    after()
    samples: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(samples[0]) < 5 or (time.perf_counter() < end and len(samples[0]) < 1000):
        for taken, run in zip(samples, (before, after), strict=True):
            start = time.perf_counter()
            run()
            taken.append((time.perf_counter() - start) * 1e3)
    old, new = (statistics.quantiles(taken, n=4) for taken in samples)
    return Time(name, old[1], new[1], (old[0], old[2]), (new[0], new[2]))


def training_step(model: nn.Module, example_inputs: Any) -> Callable[[], Any]:
    """One step of Adam on the mean square of all outputs, as a function to be timed."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        outputs = [t for t in tensors_in(run_example(model, copy_tensors(example_inputs))) if t.requires_grad]
        if outputs:
            torch.stack([t.abs().square().mean() for t in outputs]).sum().backward()
        optimizer.step()

    return step


def _layer_inputs(
    converted: nn.Module, rewrites: Sequence[Rewrite], example_inputs: Any
) -> list[Tensor | None]:
    """What each fused layer is given when the model runs, the first time."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for r in rewrites:

        def keep(module: nn.Module, args: Any, into: str = r.into) -> None:
            seen.setdefault(into, args[0].detach())

        hooks.append(converted.get_submodule(r.into).register_forward_pre_hook(keep))
    try:
        with torch.no_grad():
            run_example(converted, copy_tensors(example_inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return [seen.get(r.into) for r in rewrites]


def _loop(original: nn.Module, r: Rewrite, x: Tensor) -> Callable[[], Any]:
    linears: list[Any] = [original.get_submodule(path) for path in r.replaces]
    if r.spatial:  # the layer is given channels last already: time the loop on Linears of the same sizes
        alike = LinearList(r.in_features, r.out_features[0], len(linears), r.bias, x.device, x.dtype)
        linears = list(alike.to_linears())
    shared = r.rule == "wide_linear" or x.shape[-2] != len(linears)

    @torch.no_grad()
    def run() -> Any:
        if shared:
            return [linear(x) for linear in linears]
        return torch.stack([linear(x[..., n, :]) for n, linear in enumerate(linears)], -2)

    return run


def _layer(converted: nn.Module, r: Rewrite, x: Tensor) -> Callable[[], Any]:
    layer = converted.get_submodule(r.into)

    @torch.no_grad()
    def run() -> Any:
        return layer(x)

    return run
