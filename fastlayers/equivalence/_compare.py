"""Compare runs of two models, tensor by tensor: in float64 for wiring, in the working dtype for accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._judge import Judgement, Verdict, judge_tensor
from ._mapping import Group, Mapping
from ._run import Run
from ._tree import is_differentiable

FLOAT64_RELATIVE = 1e-12  # float64 results agree to this share of a tensor's largest element, ...
ENVELOPE_FACTOR = 16.0  # ... or to this many times what one-ulp changes of weights and inputs change them

Pick = Callable[[Run], Any]


@dataclass(frozen=True)
class Comparison:
    """One tensor, or one group of equal ones, compared: where, at which stage, and what the judge found.

    `mode`: eval or train; `stage`: "float64", the working dtype, or the name of a probe; `kind`: output,
    input gradient, parameter gradient, buffer or linear list.
    """

    mode: str
    stage: str
    kind: str
    judgement: Judgement

    @property
    def name(self) -> str:
        return self.judgement.name

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def severity(self) -> tuple[int, float]:
        return self.judgement.severity

    def __str__(self) -> str:
        return f"{self.mode}, {self.stage}, {self.kind} {self.judgement}"


@dataclass(frozen=True)
class Slot:
    """The same tensor in several runs; `old` takes it from the original's, `new` from the converted model's.

    `names`: for a group of parameters stacked along `list_dim`, the name of each.
    """

    kind: str
    label: str
    old: Pick
    new: Pick
    names: tuple[str, ...] = ()
    list_dim: int | None = None

    def named(self, judgement: Judgement) -> Judgement:
        """The judgement under the name of the one parameter that its worst element belongs to."""
        if judgement.linear is None or not self.names:
            return replace(judgement, name=self.label)
        name, index = self.names[judgement.linear], judgement.index
        return replace(judgement, name=name, index=None if index is None else index[1:], linear=None)


def slots(original: Run, mapping: Mapping) -> Iterator[Slot]:
    """Everything compared between runs: outputs, gradients of inputs and of original parameters, buffers."""
    for path in original.outputs:
        pick = _picker("outputs", path)
        yield Slot("output", path, pick, pick)
    for path in original.input_grads:
        pick = _picker("input_grads", path)
        yield Slot("input gradient", path, pick, pick)
    for group in mapping.groups:
        kinds = {"parameter_grads": "parameter gradient", "buffers": "buffer"}
        for field, kind in kinds.items():
            if any(name in getattr(original, field) for name in group.old):
                names, dim = (group.old, 0) if group.index is not None else ((), None)
                yield Slot(kind, group.label, *_group_pickers(field, group), names, dim)


def _picker(field: str, path: str) -> Pick:
    return lambda run: getattr(run, field).get(path)


def _group_pickers(field: str, group: Group) -> tuple[Pick, Pick]:
    return (lambda run: group.take_old(getattr(run, field))), (
        lambda run: group.take_new(getattr(run, field))
    )


Envelope = Callable[[Slot], Any]


def compare_float64(slot: Slot, original: Run, converted: Run, envelope: Envelope) -> Judgement:
    """Do both give the same in float64?

    `envelope(slot)`: how much one-ulp changes change the original there; asked for only when needed.
    """
    old, new = slot.old(original), slot.new(converted)
    if (settled := _settled(slot, old, new)) is not None:
        return settled
    if not is_differentiable(old):
        return _different(slot, f"{int((old != new).sum())} of {old.numel()} elements differ")
    old, new = _reals(old), _reals(new)
    if not torch.equal(old.isnan(), new.isnan()) or not torch.equal(_infinite(old), _infinite(new)):
        at = _first((old.isnan() != new.isnan()) | (_infinite(old) != _infinite(new)))
        return slot.named(_difference(at, old, new, slot, float("inf"), 1.0, "NaN or Inf differ"))
    distance = torch.where(old.isfinite(), (old - new).abs(), 0.0)
    largest = torch.where(old.isfinite(), old.abs(), 0.0)
    rows = (distance.shape[0], -1) if slot.list_dim is not None else (1, -1)
    per_linear = distance.reshape(rows).amax(dim=1)
    allowed = FLOAT64_RELATIVE * largest.reshape(rows).amax(dim=1)
    if (per_linear > allowed).any():
        change = _reals(envelope(slot)).reshape(rows).amax(dim=1)
        allowed = torch.maximum(allowed, ENVELOPE_FACTOR * change)
    ratio = torch.where(per_linear > 0, per_linear / allowed, 0.0)
    row = int(ratio.argmax())
    at = row * (distance.numel() // rows[0]) + int(distance.reshape(rows)[row].argmax())
    relative = float(per_linear[row] / largest.reshape(rows)[row].amax().clamp(min=1e-300))
    return slot.named(_difference(at, old, new, slot, float(ratio[row]), relative, ""))


def _difference(
    at: int, old: Tensor, new: Tensor, slot: Slot, ratio: float, relative: float, reason: str
) -> Judgement:
    index: list[int] = []
    rest = at
    for size in reversed(old.shape):
        rest, i = divmod(rest, size)
        index.insert(0, i)
    if ratio > 1.0 and not reason:
        reason = f"differs by {relative:.2g} of its largest element in float64"
    return Judgement(
        name=slot.label,
        verdict=Verdict.DIFFERENT if ratio > 1.0 else Verdict.AS_ACCURATE,
        ratio=ratio,
        limit=1.0,
        error_new=relative,
        index=tuple(index),
        linear=index[0] if slot.list_dim is not None else None,
        result=float(new.flatten()[at]),
        reference=float(old.flatten()[at]),
        original=float(old.flatten()[at]),
        reason=reason,
    )


def compare_working(
    slot: Slot, original: Run, converted: Run, reference: Run | None, envelope: Envelope
) -> Judgement:
    """Is the converted model's result as accurate as the original's, measured by the float64 `reference`?

    Without a reference, the distance between the two is judged by the envelope alone.
    """
    old, new = slot.old(original), slot.new(converted)
    if (settled := _settled(slot, old, new)) is not None:
        return settled
    expected = old if reference is None else slot.old(reference)
    if not is_differentiable(old):
        return _counted(slot, old, new, envelope)
    judgement = judge_tensor(new, old, expected, list_dim=slot.list_dim, name=slot.label)
    if judgement.verdict > Verdict.AS_ACCURATE and judgement.reason != "NaN or Inf differ":
        change = envelope(slot)
        judgement = judge_tensor(
            new, old, expected, envelope=change.abs().double(), list_dim=slot.list_dim, name=slot.label
        )
    return slot.named(judgement)


def _counted(slot: Slot, old: Tensor, new: Tensor, envelope: Envelope) -> Judgement:
    """Integers may follow from rounded numbers (an argmax): as many may differ as one-ulp changes flip."""
    count, flips = int((old != new).sum()), int((envelope(slot) != 0).sum())
    verdict = Verdict.AS_ACCURATE if count <= flips else Verdict.WITHIN_BOUND
    reason = f"{count} of {old.numel()} elements differ; one-ulp changes flip {flips}"
    return Judgement(slot.label, verdict, ratio=count / max(flips, 1), limit=1.0, reason=reason)


def _settled(slot: Slot, old: Tensor | None, new: Tensor | None) -> Judgement | None:
    """What needs no arithmetic: absent, of another shape or dtype, or the same bit for bit."""
    if old is None:
        # A stack gives zeros where an unused Linear of a list has no gradient at all; the report warns of it.
        if new is None or ("gradient" in slot.kind and not new.any()):
            return Judgement(slot.label, Verdict.BITWISE)
        return _different(slot, "the original has none")
    if new is None:
        return _different(slot, "is missing")
    if old.shape != new.shape:
        return _different(slot, f"shape {tuple(new.shape)}, the original's is {tuple(old.shape)}")
    if old.dtype != new.dtype:
        return _different(slot, f"dtype {new.dtype}, the original's is {old.dtype}")
    same = (old == new) | ((old != old) & (new != new))
    return Judgement(slot.label, Verdict.BITWISE) if same.all() else None


def _different(slot: Slot, reason: str) -> Judgement:
    return Judgement(slot.label, Verdict.DIFFERENT, ratio=float("inf"), limit=1.0, reason=reason)


def _reals(t: Tensor) -> Tensor:
    return (torch.view_as_real(t) if t.is_complex() else t).double()


def _infinite(t: Tensor) -> Tensor:
    return torch.where(t.isinf(), t.sign(), 0.0)


def _first(mask: Tensor) -> int:
    return int(mask.flatten().double().argmax())
