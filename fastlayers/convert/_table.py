"""Plans and conversions as tables for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._convert import Conversion
    from ._types import Plan, Rewrite, Skip

_SHOWN = 12


def plan_table(plan: "Plan") -> str:
    """A plan: what would change and what would not."""
    linears = sum(len(r.replaces) for r in plan.matches)
    left = sum(s.code != "not-nn-linear" for s in plan.skips)
    head = f"{_count(len(plan.matches), 'rewrite')}, {linears} of {_count(linears + left, 'Linear')}"
    return "\n".join([head, *_body(plan.matches, plan.skips)])


def conversion_table(conversion: "Conversion") -> str:
    """A conversion: the same, and the verdict."""
    lines = plan_table(conversion.plan).split("\n")
    verdict = "not verified" if conversion.report is None else _verdict(conversion.report)
    lines[0] += f"; {verdict}"
    return "\n".join(lines)


def _verdict(report: Any) -> str:
    return str(report).split("\n", 1)[0]


def _body(rewrites: "Sequence[Rewrite]", skips: "Sequence[Skip]") -> list[str]:
    lines: list[str] = []
    if rewrites:
        rows = [("rule", "into", "N", "in -> out", "call site")]
        for r in rewrites:
            outs = "/".join(map(str, dict.fromkeys(r.out_features)))
            owner = f"{r.owner}." if r.owner else ""
            rows.append(
                (r.rule, r.into, str(len(r.replaces)), f"{r.in_features} -> {outs}", owner + r.call_site)
            )
        lines += ["", *columns(rows)]
    notes = dict.fromkeys(note for r in rewrites for note in r.notes)
    lines += [f"note: {note}" for note in notes]
    if skips:
        plain = [s for s in skips if s.code != "not-nn-linear"]
        others = f", and {len(skips) - len(plain)} that are not nn.Linear" if len(plain) < len(skips) else ""
        lines += ["", f"left alone: {len(plain)}{others}"]
        rows = [(s.path, s.code, s.reason, s.hint) for s in skips[:_SHOWN]]
        lines += columns([("path", "code", "reason", "what you can do"), *rows])
        if len(skips) > _SHOWN:
            lines.append(f"… and {len(skips) - _SHOWN} more")
    return lines


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which the cells of each column start below each other."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
