"""Two texts side by side: the lines that differ and what stands around them."""

import difflib
from typing import Any

_AROUND = 2
_MOST_ROWS = 400
_LONGEST = 400


def rows(before: str, after: str) -> dict[str, Any]:
    """Rows `[kind, left line number, left, right line number, right]`, runs of equal lines cut.

    Kinds: "=" equal, "~" changed, "-" only before, "+" only after, "..." left out. `num_left_out`
    counts rows beyond the limit; the raw files have them.
    """
    a, b = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    found: list[list[Any]] = []
    for group in matcher.get_grouped_opcodes(_AROUND):
        if group[0][1] or group[0][3]:
            found.append(["...", 0, "", 0, ""])
        for tag, i1, i2, j1, j2 in group:
            found += _rows(tag, a, i1, i2, b, j1, j2)
    return {"rows": found[:_MOST_ROWS], "num_left_out": max(0, len(found) - _MOST_ROWS)}


def _rows(tag: str, a: list[str], i1: int, i2: int, b: list[str], j1: int, j2: int) -> list:
    kinds = {"equal": "=", "replace": "~", "delete": "-", "insert": "+"}
    made = []
    for k in range(max(i2 - i1, j2 - j1)):
        left, right = i1 + k < i2, j1 + k < j2
        kind = kinds[tag] if (left and right) or tag != "replace" else "-" if left else "+"
        made.append(
            [
                kind,
                i1 + k + 1 if left else 0,
                a[i1 + k][:_LONGEST] if left else "",
                j1 + k + 1 if right else 0,
                b[j1 + k][:_LONGEST] if right else "",
            ]
        )
    return made
