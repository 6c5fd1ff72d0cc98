"""Names that a user gives: exact paths, globs, or ``re:`` patterns, each of which must match something."""

import fnmatch
import re
from collections.abc import Iterable


def select(paths: Iterable[str], patterns: str | Iterable[str] | None, argument: str) -> set[str] | None:
    """The paths that some pattern names, or None where no patterns are given.

    A pattern is a path, which also names all below it ("mu" is mu.0, mu.1, …, and not mu2), a glob
    ("*.heads.*"), or "re:" and a regular expression that must match the whole path.

    Raises:
        ValueError: a pattern that matches nothing, or is no valid regular expression.
    """
    if patterns is None:
        return None
    known = list(paths)
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else list(patterns):
        found = [path for path in known if _matches(path, pattern, argument)]
        if not found:
            near = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
            raise ValueError(
                f"{argument}: {pattern!r} matches no Linear of the model; it has {near or 'none'}"
            )
        chosen.update(found)
    return chosen


def _matches(path: str, pattern: str, argument: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], path) is not None
        except re.error as error:
            raise ValueError(f"{argument}: {pattern!r} is no regular expression: {error}") from error
    if any(letter in pattern for letter in "*?["):
        return fnmatch.fnmatchcase(path, pattern)
    return path == pattern or path.startswith(pattern + ".")
