"""Random draws: recorded in one run of a model, replayed in the others, whatever their precision.

The same seed gives other numbers in float64 than in float32, so re-seeding cannot compare the two.
"""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._tree import nodes

aten = torch.ops.aten


class Draws:
    """The random numbers of one run, in order: one tuple of tensors for each op that drew."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, tuple[Tensor, ...]]] = []

    def record(self) -> TorchDispatchMode:
        return _Record(self)

    def replay(self) -> _Replay:
        return _Replay(self)


class _Record(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws.drawn.append(
                (func.name(), tuple(t.detach().clone() for t in _drawn(func, args, result)))
            )
        return result


class _Replay(TorchDispatchMode):
    """`mismatch` says what went wrong when a run drew otherwise than the recorded one."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._left = list(draws.drawn)
        self.mismatch = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        drawn = _drawn(func, args, result)
        recorded = self._next(func.name(), drawn)
        if recorded is None:
            return result
        for target, value in zip(drawn, recorded, strict=True):
            target.copy_(value)
        if func is aten.native_dropout.default:  # (output, mask): the output follows from the mask
            x, p = args[0], args[1]
            result[0].copy_(x * result[1] / (1 - p) if p < 1 else torch.zeros_like(x))
        return result

    def _next(self, name: str, drawn: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The recorded draw for this op; or several equal ones, stacked, where N draws became one."""
        if not self._left:
            self.mismatch = self.mismatch or f"{name} draws more than the original did"
            return None
        if _shapes(self._left[0][1]) == _shapes(drawn):
            return self._left.pop(0)[1]
        if len(drawn) == 1 and (stacked := self._stacked(name, drawn[0])) is not None:
            return (stacked,)
        shape, expected = _shapes(drawn), _shapes(self._left[0][1])
        self.mismatch = self.mismatch or f"{name} draws {shape} where the original drew {expected}"
        return None

    def _stacked(self, name: str, target: Tensor) -> Tensor | None:
        shape = self._left[0][1][0].shape
        for dim, count in enumerate(target.shape):
            rest = (*target.shape[:dim], *target.shape[dim + 1 :])
            group = self._left[:count]
            if rest == shape and len(group) == count and all(_shapes(d) == [shape] for _, d in group):
                del self._left[:count]
                return torch.stack([d[0] for _, d in group], dim=dim)
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None and self._left and not self.mismatch:
            self.mismatch = f"{len(self._left)} of the original's draws were not made"
        super().__exit__(exc_type, exc_value, traceback)


class ConstantDraws(TorchDispatchMode):
    """Makes every draw the same number, so that models which draw in different orders can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = func.name()
            for t in _drawn(func, args, result):
                if "randperm" in name:
                    t.copy_(torch.arange(t.numel()))
                elif "bernoulli" in name or "dropout" in name:
                    t.fill_(1)
                elif t.is_floating_point():
                    t.fill_(0.5)
                else:
                    t.fill_(args[0] if ".low" in name else 0)
            if func is aten.native_dropout.default:
                result[0].copy_(args[0] / (1 - args[1]) if args[1] < 1 else torch.zeros_like(args[0]))
        return result


def _drawn(func: Any, args: Any, result: Any) -> tuple[Tensor, ...]:
    """The tensors that hold random numbers after `func`."""
    if func is aten.native_dropout.default:
        return (result[1],)
    if func in (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default):
        return (args[1],)
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(t for t in results if isinstance(t, Tensor))


def _shapes(drawn: tuple[Tensor, ...]) -> list[torch.Size]:
    return [t.shape for t in drawn]


class RandomState:
    """Every source of random numbers a model can use: torch's generators, its own, Python's, NumPy's."""

    def __init__(self, *models: nn.Module) -> None:
        self._own = [g for model in models for g in _generators(model)]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._owned = [g.get_state() for g in self._own]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in zip(self._own, self._owned, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def moved(self) -> bool:
        """Has anything been drawn since?"""
        now = RandomState()
        cuda = len(now._cuda) != len(self._cuda) or any(
            not torch.equal(a, b) for a, b in zip(now._cuda, self._cuda, strict=True)
        )
        own = any(not torch.equal(g.get_state(), s) for g, s in zip(self._own, self._owned, strict=True))
        return not torch.equal(now._cpu, self._cpu) or cuda or own or now._python != self._python


def _generators(model: nn.Module) -> list[torch.Generator]:
    found = {
        id(g): g
        for module in model.modules()
        if type(module) is not nn.Linear
        for _, g in nodes([v for k, v in module.__dict__.items() if not k.startswith("_")])
        if isinstance(g, torch.Generator)
    }
    return list(found.values())
