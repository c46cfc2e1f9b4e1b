"""Assigns each kernel of a timeline to a call of a compiled graph and to a layer.

Calls are found by their names and their order in Inductor's code. Times in microseconds.
"""

import dataclasses
import re
from typing import Any

from graphs.dumps.groups import ATTENTION, PRODUCTS, group_of

_NUMBERED = re.compile(r"((?:.*?\.)?)(\d+)(?:\.|$)")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a graph."""

    graph: int
    number: int
    name: str
    kind: str  # "product", "attention", "kernel" of Inductor, "operator"


def calls_of(kernels: list[list[dict[str, Any]]], on_gpu: bool) -> list[list[Call]]:
    """The calls of each graph, without those that a trace cannot show."""
    return [
        [
            Call(i, j, call["name"], call["kind"])
            for j, call in enumerate(calls)
            if on_gpu or call["kind"] != "kernel"
        ]
        for i, calls in enumerate(kernels)
    ]


def assigned(names: list[str], graphs: list[list[Call]], on_gpu: bool) -> list[Call | None]:
    """The call of every kernel; None: it is outside of the graphs, as sampling is.

    The path of the best score: a kernel is of the same call as the one before, of the next call, or
    begins a graph. On a CPU a call is rarely more than one operator.
    """
    again = 0.5 if on_gpu else 2.0
    states: list[Call | None] = [None, *(call for calls in graphs for call in calls)]
    own = {call.name for call in states if call is not None and call.kind == "kernel"}
    moves = _moves(graphs)
    best, came = [0.0] + [-1e9] * (len(states) - 1), []
    for name in names:
        scores = [_score(name, state, own) for state in states]
        new, source = [-1e9] * len(states), [0] * len(states)
        for at in range(len(states)):
            for before, cost in moves[at]:
                stays = again if before == at and at and scores[at] > 0 else 0.0
                value = best[before] + cost + scores[at] - stays
                if value > new[at]:
                    new[at], source[at] = value, before
        best = new
        came.append(source)
    path, at = [], max(range(len(states)), key=best.__getitem__) if names else 0
    for source in reversed(came):
        path.append(states[at])
        at = source[at]
    return path[::-1]


def _moves(graphs: list[list[Call]]) -> list[list[tuple[int, float]]]:
    """By state, the states that may come before it, and the cost: calls that are left out."""
    places, at = [], 1
    for calls in graphs:
        places.append(range(at, at + len(calls)))
        at += len(calls)
    moves: list[list[tuple[int, float]]] = [[] for _ in range(at)]
    moves[0] = [(0, 0.0)]
    ends = [(p, -2.0 * (place.stop - 1 - p)) for place in places for p in place[-4:]]
    moves[0] += ends
    for place in places:
        for p in place:
            moves[p].append((p, 0.0))
            moves[p] += [(q, -1.0 * (p - q - 1)) for q in place if p - 5 < q < p]
            if p - place.start < 4:
                skipped = -1.0 - 2.0 * (p - place.start)
                moves[p] += [(0, skipped), *((e, cost + skipped) for e, cost in ends)]
    return moves


def _score(name: str, state: Call | None, own: set[str]) -> float:
    if name in own:
        return 5.0 if state is not None and state.name == name else -9.0
    group = group_of(name)
    is_attention, is_product = group == ATTENTION, group == PRODUCTS
    if state is None:
        return -1.0 if is_attention else -0.5 if is_product else 0.5
    if state.kind == "kernel":
        return -9.0
    if state.kind == "operator":
        return -1.0 if is_attention or is_product else 1.0
    right = is_attention if state.kind == "attention" else is_product
    return 4.0 if right else -1.0


def beside_calls(
    timeline: dict[str, Any], kernels: list[list[dict[str, Any]]], calls: list[int]
) -> dict[str, Any]:
    """The timeline with names once, rows of numbers, and the calls, the longest first.

    A row: begin, duration, number of the name, graph, call, and number of the layer from 1. Graph
    and call are -1 for a kernel of no call, the layer is 0 outside of layers.

    Args:
        timeline: as `dump.json` holds it.
        kernels: the calls of every graph, see `graphs.dumps.kernels`.
        calls: how often each graph is called in a step.
    """
    ran, on_gpu = timeline["kernels"], timeline["device"] != "cpu"
    path = assigned([one["name"] for one in ran], calls_of(kernels, on_gpu), on_gpu)
    number = {name: i for i, name in enumerate(dict.fromkeys(one["name"] for one in ran))}
    rows = []
    for one, call, layer in zip(ran, path, _layers(path, kernels, calls), strict=True):
        place = (call.graph, call.number) if call else (-1, -1)
        rows.append([one["start_us"], one["us"], number[one["name"]], *place, layer])
    rest = {name: value for name, value in timeline.items() if name != "kernels"}
    times = _times(rows, list(number), timeline, kernels)
    return {**rest, "names": list(number), "rows": rows, "calls": times}


def _layers(
    path: list[Call | None], kernels: list[list[dict[str, Any]]], calls: list[int]
) -> list[int]:
    """The layer of every kernel, from 1; 0: of none.

    Calls of a graph that equal layers share are counted. In other graphs a call is of the layer of
    its module; without a module, of the layer of the call before it.
    """
    stated = _stated_layers(kernels)
    found, layer, last = [], 0, None
    for call in path:
        own = stated[call.graph][call.number] if call else 0
        if call and calls[call.graph] > 1:
            begins = last is None or call.graph != last.graph or call.number < last.number
            if begins:
                pairs = zip(kernels[call.graph], stated[call.graph], strict=True)
                layer = max(layer + 1, *(n for one, n in pairs if one["group"] == ATTENTION), 0)
            own = layer
        elif call and call.kind == "attention":
            layer = own  # shared layers are counted from here on
        found.append(own)
        last = call or last
    return found


def _stated_layers(kernels: list[list[dict[str, Any]]]) -> list[list[int]]:
    """By graph and call, the layer in its module's name: `model.layers.3`, as attention has it."""
    lists = {
        match[1]
        for calls in kernels
        for call in calls
        if call["group"] == ATTENTION and (match := _NUMBERED.match(call["module"]))
    }
    stated = []
    for calls in kernels:
        layers = [0]
        for call in calls:
            match = _NUMBERED.match(call["module"])
            own = int(match[2]) + 1 if match and match[1] in lists else 0
            layers.append(own if call["module"] else layers[-1])
        stated.append(layers[1:])
    return stated


def _times(
    rows: list[list[Any]], names: list[str], timeline: dict[str, Any], kernels: list[list[dict]]
) -> list[dict[str, Any]]:
    """Calls, and kernels of no call by name, with their time in the step, the longest first."""
    groups: dict[tuple[int, int], list[list[Any]]] = {}
    for row in rows:
        groups.setdefault((row[3], row[4]) if row[3] >= 0 else (-1, row[2]), []).append(row)
    found = []
    for (graph, place), members in groups.items():
        total = sum(row[1] for row in members)
        num_calls = len({row[5] for row in members}) if graph >= 0 else len(members)
        moved = kernels[graph][place]["bytes"] if graph >= 0 else None
        each, peak = total / num_calls, timeline["bandwidth"]
        found.append(
            {
                "graph": graph,
                "call": place if graph >= 0 else -1,
                "names": sorted({names[row[2]] for row in members}),
                "num": num_calls,
                "total_us": round(total, 3),
                "each_us": round(each, 3),
                "of_step": total / timeline["sum_us"] if total else 0.0,
                "bytes": moved,
                "of_bandwidth": moved / (1e-6 * each * peak) if moved and peak and each else None,
            }
        )
    return sorted(found, key=lambda one: -one["total_us"])
