"""What `verify` found: a verdict, every comparison behind it, and what could not be checked."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ._compare import Comparison
from ._judge import Verdict

SCHEMA_VERSION = 1
ACCEPTED = {"accurate": Verdict.AS_ACCURATE, "bound": Verdict.WITHIN_BOUND}


@dataclass(frozen=True)
class Check:
    """Something that holds or not, without arithmetic: a shape, a type, a flag, a missing name."""

    mode: str
    name: str
    ok: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.mode}, {self.name}: {'ok' if self.ok else self.detail}"


@dataclass
class Report:
    """The result of `verify`.

    `comparisons`: every tensor compared, `checks`: what needs no arithmetic, `warnings`: what a user should
    know though nothing is wrong, `unchecked`: what could not be checked, and why. `facts`: dtype, seed,
    versions, time.
    """

    accept: str = "accurate"
    comparisons: list[Comparison] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of all; None when nothing could be compared."""
        if any(not check.ok for check in self.checks):
            return Verdict.DIFFERENT
        return max((c.verdict for c in self.comparisons), default=None)

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.verdict <= ACCEPTED[self.accept]

    @property
    def worst(self) -> Comparison | None:
        """The comparison nearest to its limit, or furthest beyond it."""
        return max(self.comparisons, key=lambda c: c.severity, default=None)

    @property
    def worst_ratio(self) -> Comparison | None:
        """The comparison in the working dtype with the largest error in units of the original's."""
        judged = [c for c in self.comparisons if c.stage != "float64" and c.verdict != Verdict.BITWISE]
        return max(judged, key=lambda c: c.judgement.ratio, default=None)

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that are not accepted, worst first."""
        bad = [c for c in self.comparisons if c.verdict > ACCEPTED[self.accept]]
        return sorted(bad, key=lambda c: c.severity, reverse=True)

    def raise_if_failed(self) -> None:
        """Raise EquivalenceError, which carries this report, unless `passed`."""
        if not self.passed:
            raise EquivalenceError(self)

    def headline(self) -> str:
        """One line: the verdict and the number behind it."""
        if self.verdict is None:
            return "not verified: nothing could be compared"
        text = str(self.verdict)
        broken = [check for check in self.checks if not check.ok]
        if broken:
            return f"{text} ({broken[0]})"
        if self.failures:
            return f"{text} ({self.failures[0].kind} {self.failures[0].name})"
        worst = self.worst_ratio
        if self.verdict == Verdict.BITWISE or worst is None:
            return text
        return f"{text} (worst ratio {worst.judgement.ratio:.2f}, {worst.kind} {worst.name})"

    def __str__(self) -> str:
        lines = [self.headline(), ""]
        lines += _table(_summary_rows(self.comparisons))
        broken = [str(check) for check in self.checks if not check.ok]
        for title, entries in (
            ("broken", broken),
            ("not accepted", [str(c) for c in self.failures]),
            ("warnings", self.warnings),
            ("not checked", self.unchecked),
        ):
            if entries:
                lines += ["", f"{title}:", *(f"  {entry}" for entry in entries[:12])]
                lines += [f"  and {len(entries) - 12} more"] if len(entries) > 12 else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole report as JSON; numbers that JSON lacks (NaN, infinities) are strings."""
        verdict = self.verdict
        content = {
            "schema_version": SCHEMA_VERSION,
            "verdict": None if verdict is None else str(verdict),
            "passed": self.passed,
            "accept": self.accept,
            "headline": self.headline(),
            "facts": self.facts,
            "checks": [asdict(check) for check in self.checks],
            "comparisons": [_comparison_dict(c) for c in self.comparisons],
            "warnings": self.warnings,
            "unchecked": self.unchecked,
        }
        return json.dumps(_jsonable(content), indent=1, allow_nan=False)


class EquivalenceError(Exception):
    """The converted model is not equivalent to the original, or could not be verified; carries `.report`."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[EquivalenceError], tuple[Report]]:
        return type(self), (self.report,)


def _comparison_dict(comparison: Comparison) -> dict[str, Any]:
    judgement = asdict(comparison.judgement)
    judgement["verdict"] = str(comparison.verdict)
    return {"mode": comparison.mode, "stage": comparison.stage, "kind": comparison.kind, **judgement}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _summary_rows(comparisons: list[Comparison]) -> list[list[str]]:
    """One row for each mode, stage and kind: how many, the worst verdict, and the worst of them."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.mode, comparison.stage, comparison.kind), []).append(comparison)
    rows = [["mode", "stage", "compared", "verdict", "worst", "limit", "where"]]
    for (mode, stage, kind), members in groups.items():
        worst = max(members, key=lambda c: c.severity)
        judgement = worst.judgement
        plural = kind + "s" if len(members) != 1 else kind
        numbers = ["", "", ""]
        if worst.verdict != Verdict.BITWISE:
            numbers = [f"{judgement.ratio:.2g}", f"{judgement.limit:.2g}", worst.name]
            if stage == "float64":
                numbers[:2] = [f"{judgement.error_new:.1g}", f"{judgement.error_new / judgement.ratio:.0e}"]
        rows.append([mode, stage, f"{len(members)} {plural}", _SHORT[worst.verdict], *numbers])
    return rows


_SHORT = {
    Verdict.BITWISE: "bitwise",
    Verdict.AS_ACCURATE: "as accurate",
    Verdict.WITHIN_BOUND: "less accurate",
    Verdict.DIFFERENT: "DIFFERENT",
}


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
