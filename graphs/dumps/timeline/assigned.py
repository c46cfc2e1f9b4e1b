"""The call of a compiled graph that each kernel of a timeline belongs to, and the longest calls.

Calls are found by their order in Inductor's code and by names. Times in microseconds.
"""

import dataclasses
from typing import Any

from graphs.dumps.output_code.groups import ATTENTION, PRODUCTS, group_of


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a graph."""

    graph: int
    number: int
    name: str
    kind: str  # "product", "attention", "kernel" of Inductor, "operator"


def calls_of(kernels: list[list[dict[str, Any]]], on_gpu: bool) -> list[list[Call]]:
    """Of every graph; those that a trace cannot show are left out."""
    found = []
    for i, calls in enumerate(kernels):
        all_of = [Call(i, j, call["name"], _kind(call)) for j, call in enumerate(calls)]
        found.append([c for c in all_of if on_gpu or c.kind != "kernel"])
    return found


def _kind(call: dict[str, Any]) -> str:
    if call["source"]:
        return "kernel"
    return {PRODUCTS: "product", ATTENTION: "attention"}.get(call["group"], "operator")


def assigned(names: list[str], graphs: list[list[Call]]) -> list[Call | None]:
    """The call of every kernel; None: what stands around the graphs, as sampling.

    The best path by scores: a kernel follows in its call, in the next one, or begins a graph.
    """
    states: list[Call | None] = [None, *(call for calls in graphs for call in calls)]
    own = {call.name for call in states if call is not None and call.kind == "kernel"}
    moves = _moves(graphs)
    best, came = [0.0] + [-1e9] * (len(states) - 1), []
    for name in names:
        scores = [_score(name, state, own) for state in states]
        new, source = [-1e9] * len(states), [0] * len(states)
        for at in range(len(states)):
            for before, cost in moves[at]:
                stays = 0.5 if before == at and at and scores[at] > 0 else 0.0
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
    """By state, those that may come before it, and the cost: left-out calls."""
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
    timeline: dict[str, Any], kernels: list[list[dict[str, Any]]], calls: list[int], on_gpu: bool
) -> dict[str, Any]:
    """The timeline with names once, rows of numbers, and the ten calls that took longest.

    A row: begin, duration, number of the name, graph, call, number of the layer's call from 1, and
    bytes; -1 and -1 for a kernel of no call, 0 outside of layers.

    Args:
        timeline: as `dump.json` holds it.
        kernels: the calls of every graph, as `beside_graph` returns them.
        calls: how often each graph is called in a step.
        on_gpu: whether the trace shows Inductor's kernels.
    """
    ran = timeline["kernels"]
    path = assigned([one["name"] for one in ran], calls_of(kernels, on_gpu))
    number = {name: i for i, name in enumerate(dict.fromkeys(one["name"] for one in ran))}
    rows, layer, last = [], 0, None
    for one, call in zip(ran, path, strict=True):
        repeated = call is not None and calls[call.graph] > 1
        if call is not None and _begins(call, last):
            layer += repeated
        place = (call.graph, call.number) if call else (-1, -1)
        times = one["start_us"], one["us"], number[one["name"]]
        rows.append([*times, *place, layer if repeated else 0, one["bytes"]])
        last = call or last
    names = list(number)
    largest = _largest(rows, names, timeline, kernels)
    rest = {name: value for name, value in timeline.items() if name != "kernels"}
    return {**rest, "names": names, "rows": rows, "largest": largest}


def _begins(call: Call, last: Call | None) -> bool:
    """Whether the graph is called anew."""
    return last is None or call.graph != last.graph or call.number < last.number


def _largest(
    rows: list[list[Any]], names: list[str], timeline: dict[str, Any], kernels: list[list[dict]]
) -> list[dict[str, Any]]:
    """Calls, and kernels of no call by name, by their time in the step, the ten longest."""
    groups: dict[tuple[int, int], list[list[Any]]] = {}
    for row in rows:
        groups.setdefault((row[3], row[4]) if row[3] >= 0 else (-1, row[2]), []).append(row)
    found = []
    for (graph, place), members in groups.items():
        total = sum(row[1] for row in members)
        num_calls = len({row[5] for row in members}) if graph >= 0 else len(members)
        call = kernels[graph][place] if graph >= 0 else None
        moved = _moved(members, num_calls, call, timeline)
        each, peak = total / num_calls, timeline["bandwidth"]
        found.append(
            {
                "graph": graph,
                "call": place if graph >= 0 else -1,
                "names": sorted({names[row[2]] for row in members}),
                "num": num_calls,
                "total_us": round(total, 3),
                "each_us": round(each, 3),
                "bytes": moved,
                "of_bandwidth": moved / (1e-6 * each * peak) if moved and peak and each else None,
            }
        )
    return sorted(found, key=lambda one: -one["total_us"])[:10]


def _moved(
    members: list[list[Any]], num_calls: int, call: dict[str, Any] | None, timeline: dict[str, Any]
) -> int | None:
    """Bytes of one call: those of its kernels in the timeline, else by the sizes in its code."""
    known = [row[6] for row in members if row[6] is not None]
    if known:
        return sum(known) // num_calls
    sizes = call["bytes"] if call else None
    if sizes is None:
        return None
    cached = sizes["per_cached_token"] * timeline["num_reqs"] * timeline["seq_len"]
    return sizes["fixed"] + sizes["per_token"] * timeline["num_tokens"] + cached
