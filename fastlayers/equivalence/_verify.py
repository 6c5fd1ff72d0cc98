"""`verify`: is a converted model the same as the original?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._compare import Comparison, compare_float64, compare_working, slots
from ._draws import Draws, RandomState
from ._envelope import Envelope
from ._judge import Judgement
from ._mapping import Mapping as ParameterMapping
from ._report import ACCEPTED, Check, Report
from ._run import Inputs, Run, Runner
from ._sites import judge_site, tapped_linears
from ._subject import Subject
from ._taps import Taps
from ._tree import is_differentiable, wide

MODES = ("eval", "train")


def verify(
    original: nn.Module,
    converted: nn.Module,
    inputs: Inputs,
    *,
    param_map: Mapping[str, Any] | None = None,
    accept: str = "accurate",
    modes: Sequence[str] = MODES,
    seed: int = 0,
) -> Report:
    """Compare two models on the same inputs, without a tolerance, and say how equivalent they are.

    `inputs`: a tuple of positional arguments or a dict of keyword arguments. `param_map`, from a
    `Conversion`: `{old name: (new name, index or (start, stop) or None, shape)}`; names it lacks are
    unchanged.

    Both run in float64 first, where only wiring can make them differ; then in their own dtype, where each
    output, input gradient and gradient of an original parameter must be as near to the float64 result as the
    original's. What the original draws at random is recorded and replayed. Both are copied, run in eval and
    in train mode, and left as they are, as is every random state.

    Returns a `Report`; `accept="bound"` lets it pass also where the converted model is less accurate but
    within what rounding explains. Raises TypeError for inputs or a model that cannot be used, ValueError for
    an option or `param_map` that names what is not there.
    """
    _check_arguments(inputs, accept, modes)
    started = time.perf_counter()
    report = Report(accept=accept)
    everything = RandomState(original, converted)
    try:
        _Verification(original, converted, inputs, param_map, report, seed).run(modes)
    finally:
        everything.restore()
    report.facts.update(
        seed=seed,
        modes=list(modes),
        seconds=round(time.perf_counter() - started, 3),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )
    return report


def _check_arguments(inputs: Any, accept: str, modes: Sequence[str]) -> None:
    if isinstance(inputs, Tensor):
        raise TypeError(
            "verify: inputs must be a tuple of positional or a dict of keyword arguments, got a Tensor; "
            "for a model of one argument pass (tensor,)"
        )
    if not isinstance(inputs, (tuple, dict)):
        kind = type(inputs).__name__
        raise TypeError(
            f"verify: inputs must be a tuple of positional or a dict of keyword arguments, got {kind}"
        )
    if accept not in ACCEPTED:
        raise ValueError(f"verify: accept must be one of {sorted(ACCEPTED)}, got {accept!r}")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ValueError(f"verify: modes must be some of {MODES}, got {tuple(modes)}")


class _Verification:
    """One call of `verify`: both subjects, and the runs made so far."""

    def __init__(
        self,
        original: nn.Module,
        converted: nn.Module,
        inputs: Inputs,
        param_map: Mapping[str, Any] | None,
        report: Report,
        seed: int,
    ) -> None:
        self.report, self.seed, self.inputs = report, seed, inputs
        self.mapping = ParameterMapping(original, converted, param_map)
        self.models = original, converted
        self.lists = [site.linears for site in self.mapping.sites]
        self.old, self.new = Subject(original, self.lists), Subject(converted)
        self.runner = Runner(inputs, RandomState(self.old.model, self.new.model), seed)
        for name in self.mapping.lost:
            report.checks.append(Check("-", f"parameter {name}", False, "has no counterpart"))
        if self.mapping.added:
            report.warnings.append(f"the converted model has new parameters: {_listed(self.mapping.added)}")

    def run(self, modes: Sequence[str]) -> None:
        left = list(modes)
        while left:
            mode = _Mode(self, left.pop(0))
            if mode.run():
                # Before the other modes' full checks, and before this one's model goes to float64.
                left = [other for other in left if not self._is_same(mode, other)]
                mode.compare()
                self._check_repeatable(mode)

    def _is_same(self, mode: _Mode, other: str) -> bool:
        """Does the other mode compute just what this one did, drawing nothing? Its results hold then."""
        if mode.draws is not None or mode.converted.drew:
            return False
        try:
            runs = [self.runner.run(s, other, grad=False) for s in (self.old, self.new)]
        except Exception:
            return False  # the full check says what is wrong
        known = mode.original, mode.converted
        same = all(_same_run(a, b) for a, b in zip(known, runs, strict=True))
        if not same or any(run.drew for run in runs):
            return False
        mode.repeatable = True
        self.report.facts[f"{other} mode"] = f"computes what {mode.name} mode does, bit for bit"
        return True

    def _check_repeatable(self, mode: _Mode) -> None:
        if mode.repeatable:
            return
        again = self.runner.run(self.old, mode.name, backward=False, **mode.options())
        if not _same_run(mode.original, again):
            self.report.warnings.append(f"{mode.name}: the original does not give the same twice")


class _Mode:
    """The check of one mode."""

    original: Run
    converted: Run

    def __init__(self, verification: _Verification, name: str) -> None:
        self.v, self.name, self.report = verification, name, verification.report
        self.draws: Draws | None = None
        self.constant = False
        self.repeatable = False
        self._taps = (
            Taps(
                self.v.old.model,
                tapped_linears(self.v.mapping.sites, self.v.seed),
                self.v.old.cheap_slices,
            ),
            Taps(self.v.new.model, [site.path for site in self.v.mapping.sites]),
        )

    def run(self) -> bool:
        """Run both in their own dtype; False where that fails, which is reported."""
        original = self._first_run(self._taps[0])
        converted = None if original is None else self._run_converted(original, self._taps[1])
        if original is None or converted is None:
            return False
        if self.constant:
            original = self._run(self.v.old, taps=self._taps[0])
        self.original, self.converted = original, converted
        self.report.facts.setdefault("dtype", _dtype_of(original))
        return True

    def compare(self) -> None:
        """Compare in float64, then in the own dtype, tensor by tensor and linear by linear."""
        self._judge_sites()
        reference = self._compare_float64()
        envelope = Envelope(self.v.runner, self.v.old, self.name, self.original, self.options())
        for slot in slots(self.original, self.v.mapping):
            if not _is_wide(slot.old(self.original)):
                judged = compare_working(slot, self.original, self.converted, reference, envelope)
                self._add(self.report.facts["dtype"], slot.kind, judged)
        self._warn_of_zeros()

    def options(self) -> dict[str, Any]:
        """How every further run of this mode gets its random numbers."""
        return {"constant": True} if self.constant else {"replay": self.draws}

    def _run(self, subject: Subject, **options: Any) -> Run:
        return self.v.runner.run(subject, self.name, **{**self.options(), **options})

    def _first_run(self, taps: Taps) -> Run | None:
        """The original in its own dtype; what it draws is recorded for all other runs."""
        try:
            run = self.v.runner.run(self.v.old, self.name, taps=taps)
            if run.drew:
                self.draws = Draws()
                run = self.v.runner.run(self.v.old, self.name, taps=taps, record=self.draws)
            return run
        except Exception as error:
            self._unchecked(f"the original fails: {_told(error)}")
        return None

    def _run_converted(self, original: Run, taps: Taps) -> Run | None:
        try:
            run = self._run(self.v.new, taps=taps)
            if run.draw_mismatch:
                self._unchecked(f"{run.draw_mismatch}; both were run with constant instead of random numbers")
                self.constant = True
                run = self._run(self.v.new, taps=taps)
        except Exception as error:
            self._fail("run", f"the converted model fails where the original does not: {_told(error)}")
            return None
        if run.structure != original.structure:
            pairs = zip(original.structure, run.structure, strict=False)
            changed = next((f"{b[0]} is {b[1]}, was {a[1]}" for a, b in pairs if a != b), "parts are missing")
            self._fail("output structure", changed)
        return run

    def _compare_float64(self) -> Run | None:
        """Compare in float64; returns the original's float64 run, None where there is none."""
        v = self.v
        if all(_is_wide(t) for t in self.original.outputs.values()):
            self._add_float64(self.original, self.converted, v.old, self.options())
            return self.original
        options = {**self.options(), "widened": True}
        problems: list[str] = []
        for mapped in (False, True):
            subjects = [Subject(v.models[0], v.lists), Subject(v.models[1])] if mapped else [v.old, v.new]
            reference = self._run_widened(subjects[0], mapped, problems, "original")
            if reference is None:
                continue
            other = self._run_widened(subjects[1], mapped, problems, "converted model")
            if other is not None:
                self._add_float64(reference, other, subjects[0], {**options, "mapped": mapped})
            else:
                self._unchecked(problems[-1])
            return reference
        self._unchecked(f"{problems[-1]}, so one-ulp changes alone say what may differ")
        return None

    def _run_widened(self, subject: Subject, mapped: bool, problems: list[str], who: str) -> Run | None:
        """A run in float64: of the model as it is, or `mapped`: float32 in the code taken for float64."""
        try:
            subject.widen(unregistered=mapped)
            run = self._run(subject, widened=True, mapped=mapped)
            narrow = [p for p, t in run.outputs.items() if is_differentiable(t) and not _is_wide(t)]
            if not narrow:
                return run
            problems.append(f"in float64, {narrow[0]} of the {who} stays {run.outputs[narrow[0]].dtype}")
        except Exception as error:
            problems.append(f"in float64 the {who} fails: {_told(error)}")
        return None

    def _add_float64(self, reference: Run, other: Run, subject: Subject, options: dict[str, Any]) -> None:
        envelope = Envelope(self.v.runner, subject, self.name, reference, options)
        for slot in slots(reference, self.v.mapping):
            self._add("float64", slot.kind, compare_float64(slot, reference, other, envelope))

    def _judge_sites(self) -> None:
        weights = self.v.old.parameters()
        gradients = (
            lambda names: _stacked(self.original.parameter_grads, names),
            lambda names: self.v.mapping.stack(self.converted.parameter_grads, names),
        )
        for site in self.v.mapping.sites:
            found = judge_site(
                site,
                lambda names: _stacked(weights, names),
                self._taps,
                gradients,
                self.v.seed,
            )
            if isinstance(found, str):
                self._unchecked(found)
                continue
            for judgement in found:
                self._add(self.report.facts["dtype"], "linear list", judgement)

    def _warn_of_zeros(self) -> None:
        """A stack gives a Linear that the run did not use zeros for a gradient, where the list gives None."""
        unused = [
            name
            for group in self.v.mapping.groups
            if group.index is not None and self.converted.parameter_grads.get(group.new) is not None
            for name in group.old
            if name in self.original.parameter_grads and self.original.parameter_grads[name] is None
        ]
        if unused:
            self.report.warnings.append(
                f"{self.name}: no gradient in the original, zeros in the converted model "
                f"(weight decay and momentum act on zeros, not on None): {_listed(unused)}"
            )

    def _add(self, stage: str, kind: str, judgement: Judgement) -> None:
        self.report.comparisons.append(Comparison(self.name, stage, kind, judgement))

    def _fail(self, name: str, detail: str) -> None:
        self.report.checks.append(Check(self.name, name, False, detail))

    def _unchecked(self, text: str) -> None:
        self.report.unchecked.append(f"{self.name}: {text}")


def _stacked(values: Mapping[str, Tensor | None], names: list[str]) -> Tensor | None:
    found = [t.detach() for t in (values.get(name) for name in names) if t is not None]
    return torch.stack(found) if len(found) == len(names) else None


def _same_run(a: Run, b: Run) -> bool:
    return a.structure == b.structure and all(
        torch.equal(x.isnan(), y.isnan()) and bool(((x == y) | x.isnan()).all())
        for x, y in zip(a.outputs.values(), b.outputs.values(), strict=True)
    )


def _is_wide(t: Any) -> bool:
    return isinstance(t, Tensor) and is_differentiable(t) and t.dtype == wide(t.dtype)


def _dtype_of(run: Run) -> str:
    found = [t.dtype for t in run.outputs.values() if is_differentiable(t)]
    return str(found[0]).removeprefix("torch.") if found else "integer"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
