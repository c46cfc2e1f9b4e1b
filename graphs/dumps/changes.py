"""What a pass changed: the lines that differ, and which nodes were replaced by which."""

import collections
import difflib
import itertools
import re
from collections.abc import Iterator
from typing import Any

_AROUND = 2
_MOST_ROWS = 400
_LONGEST = 400
_MOST_DRAWN = 60
_MOST_BOXES = 80
_END = re.compile(r";\s+(?:\w+ = )+None$")
_NAME = re.compile(r"\s*(\w+)(?:: \"[^\"]*\")? = ")

Lines = list[tuple[int, str]]
Nodes = dict[str, dict[str, Any]]
"""By name, in order, as `graphs.dumps.nodes` describes them."""

Place = set[tuple[int, str]]
"""Nodes that belong together: 0 before and 1 after, and the node's name."""


def rows(before: str, after: str) -> dict[str, Any]:
    """Two texts of a graph side by side: the lines that differ and two lines around them.

    Rows are `[kind, left line number, left, right line number, right]`. Kinds: "=" equal, "~"
    changed, "-" only before, "+" only after, "..." left out. `num_left_out` counts rows beyond the
    limit. Blank lines and comments are left out, and so is `;  x = None`, which ends a variable.
    """
    a, b = _lines(before), _lines(after)
    matcher = difflib.SequenceMatcher(
        None, *([t for _, t in side] for side in (a, b)), autojunk=False
    )
    found: list[list[Any]] = []
    for group in matcher.get_grouped_opcodes(_AROUND):
        if group[0][1] or group[0][3]:
            found.append(["...", 0, "", 0, ""])
        for tag, i1, i2, j1, j2 in group:
            found += (
                _rows("=", a[i1:i2], b[j1:j2]) if tag == "equal" else _paired(a[i1:i2], b[j1:j2])
            )
    return {"rows": found[:_MOST_ROWS], "num_left_out": max(0, len(found) - _MOST_ROWS)}


def _lines(text: str) -> Lines:
    """Numbers and texts of the lines that say something."""
    return [
        (number, _END.sub("", line.rstrip()))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _paired(a: Lines, b: Lines) -> list[list[Any]]:
    """Changed lines; two that define the same name are side by side."""
    names = [
        [
            found[1] if (found := _NAME.match(text)) else f"line {i}"
            for i, (_, text) in enumerate(side)
        ]
        for side in (a, b)
    ]
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    made: list[list[Any]] = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            made += _rows("~", a[i1:i2], b[j1:j2])
        else:
            made += [["-", i, text[:_LONGEST], 0, ""] for i, text in a[i1:i2]]
            made += [["+", 0, "", j, text[:_LONGEST]] for j, text in b[j1:j2]]
    return made


def _rows(kind: str, a: Lines, b: Lines) -> list[list[Any]]:
    pairs = zip(a, b, strict=True)
    return [[kind, i, left[:_LONGEST], j, right[:_LONGEST]] for (i, left), (j, right) in pairs]


def places(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which nodes were replaced by which, in the order of the graph.

    Changed nodes are in one place if one reads the other, or if a node that stayed reads one before
    and the other after. Places with the same operators are one kind, a dict:

        "before", "after": how many nodes of each operator went and came.
        "num": how many places there are.
        "drawn": {"before", "after"} of the first places, nodes of a place and those around it;
            node: {"name", "type", "op", "args", "inputs", "own": whether it went or came}.
    """
    sides = tuple({node["name"]: node for node in side} for side in (before, after))
    kinds: dict[Any, dict[str, Any]] = {}
    num_drawn = 0
    for place in _merged(_linked(*sides)):
        drawn = _drawn(sides, place)
        ops = [dict(collections.Counter(n["op"] for n in one if n["own"])) for one in drawn]
        kind = kinds.setdefault(
            tuple(frozenset(one.items()) for one in ops),
            {"before": ops[0], "after": ops[1], "num": 0, "drawn": []},
        )
        kind["num"] += 1
        if num_drawn < _MOST_DRAWN and max(map(len, drawn)) <= _MOST_BOXES:
            num_drawn += 1
            kind["drawn"].append({"before": drawn[0], "after": drawn[1]})
    return list(kinds.values())


def _linked(before: Nodes, after: Nodes) -> Iterator[Place]:
    """Changed nodes that belong together, a few at a time."""
    stayed = [n for n in before if n in after and before[n]["target"] == after[n]["target"]]
    known = set(stayed)
    for side, nodes in enumerate((before, after)):
        for name in (name for name in nodes if name not in known):
            same_name = {(which, name) for which, of in enumerate((before, after)) if name in of}
            read = {(side, one) for one in nodes[name]["inputs"] if one not in known}
            yield same_name | read
    for name in stayed:
        old, new = before[name]["inputs"], after[name]["inputs"]
        same = len(old) == len(new)
        for a, b in zip(old, new, strict=True) if same else itertools.product(old, new):
            yield {(side, one) for side, one in enumerate((a, b)) if one not in known}


def _merged(links: Iterator[Place]) -> list[Place]:
    """Places without a node in common."""
    of_node: dict[tuple[int, str], Place] = {}
    for link in links:
        touched = {id(of_node[key]): of_node[key] for key in link if key in of_node}
        place = max(touched.values(), key=len, default=set())
        for part in (link, *touched.values()):
            if part is not place:
                place |= part
                of_node.update(dict.fromkeys(part, place))
    return list({id(place): place for place in of_node.values()}.values())


def _drawn(sides: tuple[Nodes, ...], place: Place) -> list[list[dict[str, Any]]]:
    """Nodes of a place on each side, with the nodes that they read and that read them."""
    own = [{name for which, name in place if which == side} for side in (0, 1)]
    read, readers = set(), set()
    for nodes, names in zip(sides, own, strict=True):
        read |= {one for name in names for one in nodes[name]["inputs"]}
        readers |= {name for name, node in nodes.items() if not names.isdisjoint(node["inputs"])}
    found: list[list[dict[str, Any]]] = [[], []]
    for drawn, nodes, names in zip(found, sides, own, strict=True):
        shown = names | read | readers
        for name in (name for name in nodes if name in shown):
            node = nodes[name]
            is_joined = name in names | readers
            inputs = [one for one in node["inputs"] if one in shown] if is_joined else []
            kept = {key: node[key] for key in ("name", "type", "op", "args")}
            drawn.append({**kept, "inputs": inputs, "own": name in names})
    return found
