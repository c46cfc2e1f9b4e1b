"""A condensed graph as boxes, and its text: a Mermaid flowchart, which GitHub draws.

T rows of the batch, R logits rows.
"""

import dataclasses
import enum
from collections.abc import Collection, Iterable


class Kind(enum.Enum):
    """What a box stands for; its shape in Mermaid."""

    PRODUCT = '["', '"]'
    EMBEDDING = '[/"', '"/]'
    ATTENTION = '(["', '"])'
    WRITE = '[("', '")]'
    GATHER = '{{"', '"}}'
    CALL = '[["', '"]]'
    OUTPUT = '("', '")'


class Rows(enum.Enum):
    """Which rows of the batch a box computes; its colours."""

    ALL = "fill:#f6c28b,stroke:#a65e0c,color:#000"
    LOGITS = "fill:#a8d5a2,stroke:#2c6e2f,color:#000"
    NONE = "fill:#d9d9d9,stroke:#666,color:#000"

    @property
    def style(self) -> str:
        """Name of the class in the flowchart."""
        return self.name.lower()


_SPECIAL = frozenset("<>&\"'`#;[]{}|()\\")
"""What Mermaid or HTML interprets, in or out of quotes."""

_LEGEND = {Rows.ALL: "all rows, T", Rows.LOGITS: "logits rows, R", Rows.NONE: "no rows"}


@dataclasses.dataclass(frozen=True)
class Box:
    """One node of the picture, or several that stand in the same place."""

    kind: Kind
    rows: Rows
    layer: str | None  # module path up to its number
    operator: str
    subjects: tuple[str, ...]  # modules, or what is gathered or written
    shapes: tuple[str, ...]

    def label(self) -> str:
        """linear self_attn.k_proj, v_proj<br/>[1, T, 32]."""
        first, *others = self.subjects or ("",)
        parent = first.rpartition(".")[0] + "."
        names = [first, *(name.removeprefix(parent) for name in others)]
        text = escaped(f"{self.operator} {', '.join(names)}".strip())
        shapes = escaped(" and ".join(dict.fromkeys(self.shapes)), but="[]()")
        return text + f"<br/>{shapes}" * bool(shapes)


@dataclasses.dataclass(frozen=True)
class Chart:
    """Boxes in the order of the graph, and the boxes that each depends on."""

    boxes: list[Box]
    sources: list[tuple[int, ...]]

    @property
    def layers(self) -> dict[str, set[Rows]]:
        """Of each layer, in order, the rows that its boxes compute; not what it gathers."""
        found: dict[str, set[Rows]] = {}
        for box in self.boxes:
            if box.layer is not None:
                found.setdefault(box.layer, set()).update(
                    [box.rows] if box.kind is not Kind.GATHER else []
                )
        return found

    def mermaid(self, layers: Collection[str] | None = None) -> str:
        """The flowchart; of layers that are not in `layers`, a run is one box. None: all."""
        return flowchart(self, self.layers if layers is None else layers)


def before_and_after(before: Chart, after: Chart, around: int = 1) -> tuple[str, str]:
    """Both flowcharts, with the layers in both that tell something in one of them."""
    layers = telling_layers([before, after], around)
    return before.mermaid(layers), after.mermaid(layers)


def telling_layers(charts: Iterable[Chart], around: int) -> set[str]:
    """Layers at both ends, and on both sides of a change of rows."""
    shown: set[str] = set()
    for chart in charts:
        names, rows = list(chart.layers), list(chart.layers.values())
        ends = {*range(around), *range(len(names) - around, len(names))}
        for i in range(1, len(names)):
            if rows[i] != rows[i - 1]:
                ends |= {*range(i - around, i + around)}
        shown |= {name for i, name in enumerate(names) if i in ends}
    return shown


# -- text ------------------------------------------------------------------------------------------


def escaped(text: str, but: str = "") -> str:
    """`text` for a label, with what Mermaid or HTML would interpret as `#35;`.

    Args:
        text: names of the user's or of the graph's.
        but: characters that stay. Brackets mean nothing within a label's quotes.
    """
    plain = " ".join(text.split())
    return "".join(f"#{ord(c)};" if c in _SPECIAL and c not in but else c for c in plain)


def flowchart(chart: Chart, shown: Collection[str]) -> str:
    """Mermaid text: boxes by layer, edges, colours. Edges through memory are dotted."""
    hidden = _hidden_runs(chart, shown)
    lines, names = ["flowchart TD"], [f"n{i}" for i in range(len(chart.boxes))]
    for number, (layer, members) in enumerate(_by_layer(chart)):
        if layer in hidden:
            first, run = hidden[layer]
            if layer == run[0]:
                rows = next(iter(chart.layers[layer]), Rows.NONE)
                lines.append(f'    {first}["... {escaped(_in_short(chart, run))}"]:::{rows.style}')
            for i in members:
                names[i] = first
            continue
        framed = layer is not None and len(members) > 1
        lines += [f'    subgraph l{number}["{escaped(layer)}"]'] if layer and framed else []
        for i in members:
            box = chart.boxes[i]
            left, right = box.kind.value
            indent = "        " if framed else "    "
            lines.append(f"{indent}n{i}{left}{box.label()}{right}:::{box.rows.style}")
        lines += ["    end"] if framed else []
    return "\n".join([*lines, *_edges(chart, names), *_colours(chart)]) + "\n"


def _by_layer(chart: Chart) -> list[tuple[str | None, list[int]]]:
    """Boxes of each layer, where it begins; boxes outside layers each by itself."""
    groups: list[tuple[str | None, list[int]]] = []
    of_layer: dict[str, list[int]] = {}
    for i, box in enumerate(chart.boxes):
        if box.layer in of_layer:
            of_layer[box.layer].append(i)
            continue
        groups.append((box.layer, [i]))
        if box.layer is not None:
            of_layer[box.layer] = groups[-1][1]
    return groups


def _hidden_runs(chart: Chart, shown: Collection[str]) -> dict[str, tuple[str, list[str]]]:
    """Of each layer that is not shown, its run's name and layers; all of a run compute equal rows.

    A single layer is shown: "..." would take as much room.
    """
    runs: list[list[str]] = []
    previous: tuple[bool, set[Rows]] | None = None
    for layer, rows in chart.layers.items():
        state = (layer in shown or len(rows) > 1, rows)
        if state[0] or state != previous:
            runs.append([])
        if not state[0]:
            runs[-1].append(layer)
        previous = state
    return {layer: (f"m{i}", run) for i, run in enumerate(runs) if len(run) > 1 for layer in run}


def _in_short(chart: Chart, run: list[str]) -> str:
    called = {box.operator for box in chart.boxes if box.layer in run and box.kind is Kind.CALL}
    if called:
        return f"{', '.join(sorted(called))}, {len(run)} times"
    return f"{run[0]} to {run[-1]}, {len(run)} layers"


def _edges(chart: Chart, names: list[str]) -> list[str]:
    found: dict[tuple[str, str], str] = {}
    for i, sources in enumerate(chart.sources):
        for source in sources:
            arrow = "-.->" if chart.boxes[source].kind is Kind.WRITE else "-->"
            if names[source] != names[i]:
                found.setdefault((names[source], names[i]), arrow)
    return [f"    {a} {arrow} {b}" for (a, b), arrow in found.items()]


def _colours(chart: Chart) -> list[str]:
    """A legend of the colours in use, and what they are."""
    used = [rows for rows in Rows if any(box.rows is rows for box in chart.boxes)]
    legend = [f'        k{i}["{_LEGEND[rows]}"]:::{rows.style}' for i, rows in enumerate(used)]
    styles = [f"    classDef {rows.style} {rows.value}" for rows in used]
    return ['    subgraph legend["computed for"]', *legend, "    end", *styles]
