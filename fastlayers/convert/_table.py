"""Plans and conversions as tables for a terminal."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._convert import Conversion
    from ._measure import Time
    from ._types import Plan, Rewrite, Skip

_SHOWN = 12


def plan_table(plan: "Plan") -> str:
    """A plan: what would change and what would not."""
    return "\n".join([_head(plan), *_body(plan.matches, plan.skips)])


def _head(plan: "Plan") -> str:
    linears = sum(len(r.replaces) for r in plan.matches)
    left = sum(s.code != "not-nn-linear" for s in plan.skips)
    return f"{_count(len(plan.matches), 'rewrite')}, {linears} of {_count(linears + left, 'Linear')}"


def conversion_table(conversion: "Conversion") -> str:
    """A conversion: the same, and the verdict."""
    times = {} if conversion.measurement is None else {t.name: t for t in conversion.measurement.layers}
    lines = [_head(conversion.plan), *_body(conversion.rewrites, conversion.skips, times)]
    verdict = "not verified" if conversion.report is None else _verdict(conversion.report)
    lines[0] += f"; {verdict}"
    if conversion.measurement is not None:
        whole = (conversion.measurement.forward, conversion.measurement.training_step)
        rows = [(t.name, _ms(t.before_ms), _ms(t.after_ms), f"{t.gain:.1f}x") for t in whole]
        lines += ["", *columns([("", "before", "after", "gain"), *rows])]
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def _verdict(report: Any) -> str:
    return str(report).split("\n", 1)[0]


def _body(
    rewrites: "Sequence[Rewrite]", skips: "Sequence[Skip]", times: Mapping[str, "Time"] = MappingProxyType({})
) -> list[str]:
    lines: list[str] = []
    if rewrites:
        rows = [("rule", "into", "N", "in -> out", "call site", *(("before", "after") if times else ()))]
        for r in rewrites:
            outs = "/".join(map(str, dict.fromkeys(r.out_features)))
            owner = f"{r.owner}." if r.owner else ""
            row = (r.rule, r.into, str(len(r.replaces)), f"{r.in_features} -> {outs}", owner + r.call_site)
            time = times.get(r.into)
            spent = (_ms(time.before_ms), _ms(time.after_ms)) if time else ("", "")
            rows.append((*row, *(spent if times else ())))
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
