"""What became what: the places in which a pass changed its graph, each before and after.

Nodes that went and nodes that came are of one place if one reads the other, or if a node that
stayed reads the one before and the other after; else by what both read.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

from graphs.dumps.difference import lines

_MOST_DRAWN = 60
_MOST_BOXES = 80
_LONGEST = 400
_NODE = re.compile(r'^\s*(\w+)(?:: "([^"]*)")? = ([\w.]*)(.*)$')
_INPUT = re.compile(r'(\w+): "([^"]*)"')
_READ = re.compile(r"(?<![\w.'])[A-Za-z_]\w*(?![\w.'(]|\s*=)")
_STRIDES = re.compile(r"\]\[.*$")

Key = tuple[int, str]
"""0 before and 1 after, and the node's name."""


@dataclasses.dataclass(frozen=True)
class _Node:
    name: str
    type: str
    target: str
    args: str
    reads: tuple[str, ...]  # names, also those of the graph's inputs

    def described(self, own: bool, inputs: list[str]) -> dict[str, Any]:
        parts = self.target.split(".")
        return {
            "name": self.name,
            "type": self.type,
            "op": parts[-2] if self.target.startswith("torch.ops.") else parts[-1],
            "args": self.args[:_LONGEST],
            "inputs": inputs,
            "own": own,
        }


def places(before: str, after: str) -> list[dict[str, Any]]:
    """Places by what became what, in the order of the graph.

    A kind of places is a dict:
        "before", "after": how many nodes of each operator went and came.
        "num": how many places are so.
        "drawn": {"before", "after"}, nodes of a place and those around it, of the first places;
            node: {"name", "type", "op", "args", "inputs", "own": whether it went or came}.
    """
    sides = _nodes(before), _nodes(after)
    kinds: dict[Any, dict[str, Any]] = {}
    num_drawn = 0
    for place in _grouped(sides):
        drawn = [_drawn(sides, place, side) for side in (0, 1)]
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


def _nodes(text: str) -> dict[str, _Node]:
    """By name, in order; what the graph returns is one too."""
    known: set[str] = set()
    nodes = {}
    for _, line in lines(text):
        if line.lstrip().startswith("def forward"):
            known |= {name for name, _ in _INPUT.findall(line)}
        line = re.sub(r"^\s*return ", "output = output", line)
        if match := _NODE.match(line):
            name, kind, target, args = match.groups()
            read = (target.split(".")[0], *_READ.findall(args))
            if target in known:  # `x[0]`, `s * 64`
                op = "getitem" if args.startswith("[") else "".join(args.split()[:1])
                target, args = op, target + args
            elif not args:  # `self._tensor_constant0`
                target, args = "constant", target
            reads = tuple(one for one in read if one in known)
            nodes[name] = _Node(name, _STRIDES.sub("]", kind or ""), target, args, reads)
            known.add(name)
    return nodes


def _changed(sides: tuple[dict[str, _Node], ...]) -> tuple[set[str], set[str]]:
    """Names of nodes that went and of those that came.

    One that reads other nodes than before has stayed if it is they that went or came.
    """
    a, b = sides
    both = [name for name in a if name in b]
    other = {name for name in both if a[name].target != b[name].target}
    gone, come = (a.keys() - b.keys()) | other, (b.keys() - a.keys()) | other
    for name in both:
        same = a[name].args == b[name].args
        if not same and gone.isdisjoint(a[name].reads) and come.isdisjoint(b[name].reads):
            other.add(name)
    return gone | other, come | other


def _grouped(sides: tuple[dict[str, _Node], ...]) -> list[set[Key]]:
    changed = _changed(sides)
    keys = [(side, name) for side in (0, 1) for name in sides[side] if name in changed[side]]
    parent = {key: key for key in keys}

    def find(key: Key) -> Key:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    for one, other in itertools.chain(_read(sides, keys), _replaced(sides)):
        if one in parent and other in parent:
            parent[find(other)] = find(one)
    groups: dict[Key, set[Key]] = {}
    for key in keys:
        groups.setdefault(find(key), set()).add(key)
    return _joined_by_inputs(sides, list(groups.values()))


def _read(sides: tuple[dict[str, _Node], ...], keys: list[Key]) -> Iterator[tuple[Key, Key]]:
    for side, name in keys:
        yield (0, name), (1, name)
        for read in sides[side][name].reads:
            yield (side, name), (side, read)


def _replaced(sides: tuple[dict[str, _Node], ...]) -> Iterator[tuple[Key, Key]]:
    """What a node that stayed reads before and after, argument by argument."""
    for name, node in sides[0].items():
        other = sides[1].get(name)
        if other is None or other.args == node.args:
            continue
        if len(node.reads) == len(other.reads):
            pairs = zip(node.reads, other.reads, strict=True)
        else:
            pairs = itertools.product(node.reads, other.reads)
        yield from (((0, a), (1, b)) for a, b in pairs)


def _joined_by_inputs(
    sides: tuple[dict[str, _Node], ...], groups: list[set[Key]]
) -> list[set[Key]]:
    """Where nodes only went, those that only came and read most of the same nodes belong there."""

    def read(group: set[Key]) -> set[str]:
        return {r for side, n in group for r in sides[side][n].reads if r in sides[side]}

    def only(group: set[Key], side: int) -> bool:
        return all(key[0] == side for key in group)

    gone = [(group, read(group)) for group in groups if only(group, 0)]
    found = [group for group in groups if not only(group, 1)]
    for group in (group for group in groups if only(group, 1)):
        reads = read(group)
        best = max(gone, key=lambda one: len(one[1] & reads), default=None)
        if best is None or not best[1] & reads:
            found.append(group)
        else:
            best[0].update(group)
    return found


def _drawn(sides: tuple[dict[str, _Node], ...], place: set[Key], side: int) -> list[dict[str, Any]]:
    """Nodes of a place on one side, between those that it reads and those that read it."""
    reads, users = set(), set()
    for each in (0, 1):
        own = {name for which, name in place if which == each}
        reads |= {read for name in own for read in sides[each][name].reads} - own
        users |= {n for n, node in sides[each].items() if not own.isdisjoint(node.reads)} - own
    nodes, own = sides[side], {name for which, name in place if which == side}
    shown = own | reads | users
    found = []
    for name, node in nodes.items():
        if name in shown:
            inputs = [r for r in dict.fromkeys(node.reads) if r in shown and r in nodes]
            found.append(node.described(name in own, inputs if name in own | users else []))
    return found
