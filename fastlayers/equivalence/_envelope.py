"""How much the original itself changes when its weights and inputs change by one unit in the last place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._compare import Slot
from ._run import Run, Runner
from ._subject import Subject
from ._tree import copy_with, is_differentiable, wide

CHANGES = 3  # random one-ulp changes that are tried


class Envelope:
    """Callable on a `Slot`: per element, the largest change. The runs are made when first asked for.

    `options` are those of the base run.
    """

    def __init__(
        self, runner: Runner, subject: Subject, mode: str, base: Run, options: dict[str, Any]
    ) -> None:
        self._runner, self._subject, self._mode = runner, subject, mode
        self._base, self._options = base, options
        self._runs: list[Run] | None = None

    def __call__(self, slot: Slot) -> Tensor:
        if self._runs is None:
            self._runs = self._changed_runs()
        base = slot.old(self._base)
        change = torch.zeros(base.shape, dtype=torch.float64, device=base.device)
        for run in self._runs:
            other = slot.old(run)
            if isinstance(other, Tensor) and other.shape == base.shape:
                distance = (other.to(wide(base.dtype)) - base.to(wide(base.dtype))).abs().double()
                change = torch.maximum(change, torch.where(distance.isfinite(), distance, 0.0))
        return torch.stack([change, change], dim=-1) if base.is_complex() else change

    def _changed_runs(self) -> list[Run]:
        widened = self._options.get("widened", False)
        self._subject.widen() if widened else self._subject.narrow()
        runs = [self._changed_run(torch.Generator().manual_seed(seed)) for seed in range(CHANGES)]
        return [run for run in runs if run is not None]

    def _changed_run(self, generator: torch.Generator) -> Run | None:
        target = wide if self._options.get("widened", False) else (lambda dtype: dtype)
        inputs = copy_with(self._runner.inputs, lambda t: _change(t.detach().to(target(t.dtype)), generator))
        try:
            with self._subject.changed(lambda t: _change(t, generator)):
                return self._runner.run(self._subject, self._mode, inputs=inputs, **self._options)
        except Exception:
            return None  # a model that checks its numbers may refuse changed ones


def _change(t: Tensor, generator: torch.Generator) -> Tensor:
    """Each element one unit in the last place up or down."""
    if not is_differentiable(t):
        return t.clone()
    sign = torch.randint(0, 2, t.shape, generator=generator).to(t.device, t.dtype) * 2 - 1
    return t * (1 + torch.finfo(t.dtype).eps * sign)
