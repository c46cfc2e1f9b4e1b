"""Two texts of a graph side by side: the lines that differ and what stands around them.

Blank lines and comments are left out, and so is `;  x = None`, which only ends a variable.
"""

import difflib
import re
from typing import Any

_AROUND = 2
_MOST_ROWS = 400
_LONGEST = 400
_END = re.compile(r";\s+(?:\w+ = )+None$")
_NAME = re.compile(r"\s*(\w+)(?:: \"[^\"]*\")? = ")


def rows(before: str, after: str) -> dict[str, Any]:
    """Rows `[kind, left line number, left, right line number, right]`, runs of equal lines cut.

    Kinds: "=" equal, "~" changed, "-" only before, "+" only after, "..." left out. `num_left_out`
    counts rows beyond the limit; the raw files have them.
    """
    a, b = lines(before), lines(after)
    texts = [[text for _, text in side] for side in (a, b)]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    found: list[list[Any]] = []
    for group in matcher.get_grouped_opcodes(_AROUND):
        if group[0][1] or group[0][3]:
            found.append(["...", 0, "", 0, ""])
        for tag, i1, i2, j1, j2 in group:
            if tag == "replace":
                found += _paired(a[i1:i2], b[j1:j2])
            else:
                found += _rows("=" if tag == "equal" else "", a[i1:i2], b[j1:j2])
    return {"rows": found[:_MOST_ROWS], "num_left_out": max(0, len(found) - _MOST_ROWS)}


def lines(text: str) -> list[tuple[int, str]]:
    """Numbers and texts of the lines that say something."""
    return [
        (number, _END.sub("", line.rstrip()))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _paired(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> list[list[Any]]:
    """Changed lines: those that define the same name stand side by side."""
    names = [[_name(text, i) for i, (_, text) in enumerate(side)] for side in (a, b)]
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    made: list[list[Any]] = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        made += _rows("~" if tag == "equal" else "", a[i1:i2], b[j1:j2])
    return made


def _name(text: str, i: int) -> str:
    """What the line defines; of a line that defines nothing, its place."""
    found = _NAME.match(text)
    return found[1] if found else f"line {i}"


def _rows(kind: str, a: list[tuple[int, str]], b: list[tuple[int, str]]) -> list[list[Any]]:
    """Rows of lines side by side; without a kind, of the left lines and then of the right ones."""
    if kind:
        pairs = zip(a, b, strict=True)
        return [[kind, i, left[:_LONGEST], j, right[:_LONGEST]] for (i, left), (j, right) in pairs]
    gone = [["-", i, text[:_LONGEST], 0, ""] for i, text in a]
    return gone + [["+", 0, "", j, text[:_LONGEST]] for j, text in b]
