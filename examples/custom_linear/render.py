"""Copy the marked regions of the example's files, and its measurements, into docs/custom_ops.md.

    python -m examples.custom_linear.render

In the document `<!-- code: linear_op.py fake -->` stands for what lies between the comments `doc: fake` and
the next `doc:` in that file, `<!-- table: results.csv -->` for the measurements; what is between such a line
and `<!-- end -->` is written here, and a test fails where it differs.
"""

import csv
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "custom_ops.md"
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp"}
SLOT = re.compile(r"<!-- (code|table): (\S+)(?: (\S+))? -->\n.*?<!-- end -->", re.DOTALL)
MARK = re.compile(r"^(?:#|//) doc: (\w+)\n", re.MULTILINE)


def region(name: str, label: str) -> str:
    """The text between the comment `doc: <label>` of a file and the next such comment."""
    _, *pieces = MARK.split((HERE / name).read_text())
    found = [text for mark, text in zip(pieces[::2], pieces[1::2], strict=True) if mark == label]
    if len(found) != 1:
        raise ValueError(f"{name} must have one comment 'doc: {label}', has {len(found)}")
    return found[0].strip("\n")


def table(name: str) -> str:
    """The measurements as one Markdown table, and a line that names the machine."""
    rows = list(csv.DictReader((HERE / name).read_text().splitlines()))
    sizes = list(dict.fromkeys((row["B"], row["I"], row["O"]) for row in rows))
    lines = ["| | " + " | ".join(f"B, I, O = {', '.join(size)}" for size in sizes) + " |"]
    lines.append("|---|" + "---|" * len(sizes))
    for rung in dict.fromkeys(row["rung"] for row in rows):
        cells = []
        for size in sizes:
            (row,) = (r for r in rows if (r["rung"], r["B"], r["I"], r["O"]) == (rung, *size))
            spread = f"{row['ratio_q25']} to {row['ratio_q75']}"
            error = row["error"] if row["error"].startswith("bitwise") else f"error {row['error']}"
            cells.append(f"{row['time_us']} µs, **{row['ratio']}** ({spread}), {error}")
        lines.append(f"| {rung} | " + " | ".join(cells) + " |")
    one = rows[0]
    lines += ["", f"{one['cpu']}, {one['isa']}, {one['threads']} thread, {one['dtype']}; "]
    lines[-1] += f"torch {one['torch']}, Python {one['python']}."
    return "\n".join(lines)


def render(document: str) -> str:
    """Fill every slot of the document."""

    def fill(match: re.Match[str]) -> str:
        kind, name, label = match.groups()
        head = match[0].split("\n", 1)[0]
        if kind == "table":
            return f"{head}\n{table(name)}\n<!-- end -->"
        return f"{head}\n```{LANGUAGES[Path(name).suffix]}\n{region(name, label)}\n```\n<!-- end -->"

    return SLOT.sub(fill, document)


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
