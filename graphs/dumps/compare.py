"""Two dumps side by side: what changed from A to B, and what got slower."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from graphs.dumps.groups import group_of
from graphs.dumps.page import whole

Row = tuple[str, str, str, str]
"""What, in A, in B, the change in words; "" where nothing can be said."""

_NONE = "-"


def compare(a: Path, b: Path) -> dict[str, list[Row]]:
    """Rows that differ, by part; the timeline's are those that got slower first.

    Raises:
        ValueError: either is no dump, not complete, or of another version.
    """
    left, right = whole(a), whole(b)
    parts = {
        "what ran": (_ran, None),
        "memory": (_memory, bytes_in_words),
        "passes": (_passes, None),
        "graphs": (_graphs, None),
        "kernels": (_kernels, None),
    }
    found = {
        name: [row for row in _beside(read(left), read(right), words) if row[1] != row[2]]
        for name, (read, words) in parts.items()
    }
    found["timeline"] = _slower(left, right)
    return {name: rows for name, rows in found.items() if rows}


def _beside(
    a: dict[str, Any], b: dict[str, Any], words: Callable[[Any], str] | None
) -> Iterable[Row]:
    text = words or str
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name), b.get(name)
        change = ""
        if isinstance(one, int | float) and isinstance(other, int | float) and one != other:
            change = f"{'+' if other > one else '-'}{text(abs(other - one))}"
        yield (
            name,
            _NONE if one is None else text(one),
            _NONE if other is None else text(other),
            change,
        )


def _ran(data: dict[str, Any]) -> dict[str, Any]:
    session = next(iter(data["sessions"]), {})
    names = (
        "model", "device", "backend", "backend_why", "products", "mode_asked", "mode_used",
        "mode_why", "num_graphs", "num_breaks", "num_recompiles", "no_passes_why",
    )  # fmt: skip
    found = {name.replace("_", " "): session.get(name) for name in names}
    found["captured steps"] = len(session.get("graphs", ()))
    return {**found, "torch": data["torch"]}


def _memory(data: dict[str, Any]) -> dict[str, Any]:
    return next((session["memory"] for session in data["sessions"]), {})


def _passes(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    for one in data["passes"]:
        found.setdefault(f"{one['name']} on {one['graph']}", []).append(one["in_words"])
    return {name: ", ".join(words) for name, words in found.items()}


def _graphs(data: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for graph in data["graphs"]:
        found[f"{graph['name']}: calls"] = graph["num_calls"]
        called = [n for n in graph["nodes"] if n["op"] not in ("placeholder", "output")]
        found[f"{graph['name']}: operators"] = len(called)
    return found


def _kernels(data: dict[str, Any]) -> dict[str, Any]:
    """How often each kernel is called, by graph; operators of one name are one row."""
    found: dict[str, int] = {}
    for code in data["kernels"]:
        graph = code["graph"]
        owner = data["graphs"][graph]["name"] if graph is not None else code["file"]
        for call in code["calls"]:
            name = f"{owner}: {call['name']}"
            found[name] = found.get(name, 0) + 1
    return found


def _slower(left: dict[str, Any], right: dict[str, Any]) -> list[Row]:
    """The whole step, then groups, then kernels by name; those that lost most time come first."""
    a, b = left["timeline"], right["timeline"]
    if a is None or b is None:
        return []
    times = [_times(left), _times(right)]
    order = sorted(
        dict.fromkeys((*times[0], *times[1])),
        key=lambda n: (not n.startswith("group "), times[0].get(n, 0.0) - times[1].get(n, 0.0)),
    )
    rows = [_time_row(n, times[0].get(n), times[1].get(n)) for n in order]
    step = [
        _time_row("a step, measured", a["replay_us"], b["replay_us"]),
        _time_row("all kernels", a["sum_us"], b["sum_us"]),
        _time_row("gaps", a["gap_us"], b["gap_us"]),
    ]
    one, other = (f"{t['num_reqs']} requests, {t['seq_len']} cached tokens each" for t in (a, b))
    if one != other:
        step.insert(0, ("not the same step", one, other, "times do not compare"))
    return step + [row for row in rows if row[3]]


def _times(data: dict[str, Any]) -> dict[str, float]:
    """Microseconds by group and by kernel."""
    found: dict[str, float] = {}
    timeline = data["timeline"]
    for _, us, number, graph, call, _ in timeline["rows"]:
        name = timeline["names"][number]
        of = data["kernels"][graph]["calls"][call] if graph >= 0 else None
        group = of["group"] if of and of["kind"] == "kernel" else group_of(name)
        for key in (f"group {group}", name):
            found[key] = found.get(key, 0.0) + us
    return found


def _time_row(name: str, a: float | None, b: float | None) -> Row:
    left, right = (_NONE if one is None else f"{one:,.1f} us" for one in (a, b))
    if a is None or b is None:
        return (name, left, right, "new" if a is None else "gone")
    change = b - a
    share = f", {100 * change / a:+.0f} %" if a else ""
    return (name, left, right, f"{change:+,.1f} us{share}" if abs(change) >= 0.05 else "")


def bytes_in_words(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
