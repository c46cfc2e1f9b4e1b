"""Pictures of a Dynamo graph, as Mermaid flowcharts.

nodes --_Walk--> boxes and sources --_merged--> Chart --Chart.mermaid--> text

Products, attention, KV writes, gathers and embeddings are drawn, and edges go through what lies
between. T rows of the batch, R logits rows.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.graph_ops import operator_name
from fx_passes.analysis.layer_paths import layer_path, path_in_layer
from fx_passes.analysis.memory import mutated_storages, storage
from fx_passes.analysis.sizes import expression, symbols_of
from fx_passes.analysis.values import tensors_of, value_of
from fx_passes.pictures.flowchart import (
    Box,
    Chart,
    Kind,
    Rows,
    before_and_after,
    telling_layers,
)

_KINDS = {
    Kind.PRODUCT: ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_scaled_mm"),
    Kind.EMBEDDING: ("embedding",),
    Kind.ATTENTION: ("attention", "attention_with_lse", "attention_quant", "mla_attention",
                     "mla_attention_with_lse", "mla_attention_quant", "varlen_attention",
                     "scaled_dot_product_attention"),
    Kind.GATHER: ("index_select",),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def mermaid(graph: Graph, *, around: int | None = 1) -> str:
    """A Dynamo graph as a Mermaid flowchart.

    Args:
        graph: its nodes hold `example_value`s, as Dynamo leaves them.
        around: layers to show at both ends and on both sides of a layer where the rows change; the
            others are "...". None shows all.
    """
    chart = chart_of(graph)
    return chart.mermaid(None if around is None else telling_layers([chart], around))


def draw(before: Graph) -> Callable[[Graph], tuple[str, str]]:
    """A recorder's hook: what it returns draws the graph as it is now beside what became of it."""
    chart = chart_of(before)
    return lambda after: before_and_after(chart, chart_of(after))


def chart_of(graph: Graph) -> Chart:
    """What there is to see of a Dynamo graph; the graph may change afterwards."""
    walk = _Walk(graph)
    return _merged(walk.boxes, walk.sources)


class _Walk:
    """Boxes of a graph. An edge is left out where a longer path joins the same boxes.

    Residual streams would otherwise join every layer with every later one.
    """

    def __init__(self, graph: Graph) -> None:
        self.boxes: list[Box] = []
        self.sources: list[tuple[int, ...]] = []
        self._before: list[int] = []  # of each box, the bits of all boxes that it depends on
        self._behind: dict[Node, frozenset[int]] = {}  # the boxes that a value comes from
        self._written: dict[int, frozenset[int]] = {}  # the same of a storage
        self._names = _symbol_names(graph)
        inputs = graph.find_nodes(op="placeholder")
        self._inputs = {storage(x): n for n in inputs for x in tensors_of(value_of(n))}
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        behind: set[int] = set()
        for source in node.all_input_nodes:
            behind |= self._behind[source]
            for x in tensors_of(value_of(source)):
                behind |= self._written.get(storage(x), frozenset())
        found = self._latest(behind)
        mutated = mutated_storages([node])
        if kind := self._kind(node, mutated):
            found = frozenset([self._place(node, kind, found, mutated)])
        self._behind[node] = found
        for key in mutated:
            self._written[key] = self._latest(self._written.get(key, frozenset()) | found)

    def _latest(self, boxes: Collection[int]) -> frozenset[int]:
        """Those that no other of them depends on."""
        earlier = 0
        for i in boxes:
            earlier |= self._before[i]
        return frozenset(i for i in boxes if not earlier >> i & 1)

    def _kind(self, node: Node, mutated: set[int]) -> Kind | None:
        if node.op == "output":
            return Kind.OUTPUT
        if node.op == "call_module":
            return Kind.CALL
        if node.op not in ("call_function", "call_method"):
            return None
        if mutated & self._inputs.keys():
            higher = isinstance(node.target, torch._ops.HigherOrderOperator)
            return None if higher else Kind.WRITE
        if node.target is operator.getitem and _indices(node):
            return Kind.GATHER
        return _KIND_OF.get(operator_name(node))

    def _place(self, node: Node, kind: Kind, found: frozenset[int], mutated: set[int]) -> int:
        """The box of a node: a new one, or that of the keys, if these are their values."""
        box = self._box(node, kind, mutated)
        last = max(found, default=-1)
        used = any(before >> last & 1 for before in self._before[last + 1 :]) if found else True
        if kind is Kind.WRITE and not used and self.boxes[last] == box:
            self._set(last, self._latest(found - {last} | set(self.sources[last])))
            return last
        self.boxes.append(box)
        self.sources.append(())
        self._before.append(0)
        self._set(len(self.boxes) - 1, found)
        return len(self.boxes) - 1

    def _set(self, i: int, found: frozenset[int]) -> None:
        self.sources[i] = tuple(sorted(found))
        self._before[i] = 0
        for source in found:
            self._before[i] |= self._before[source] | 1 << source

    def _box(self, node: Node, kind: Kind, mutated: set[int]) -> Box:
        layer, subject = layer_path(node), path_in_layer(node)
        name, shown = operator_name(node), [value_of(node)]
        if kind is Kind.WRITE:
            name, shown = "write", _largest(node, mutated)
            subject = _plain(next(n for s, n in self._inputs.items() if s in mutated).name)
        elif kind is Kind.GATHER:
            subject = _plain(node.all_input_nodes[0].name)
        elif kind is Kind.CALL:
            layer, name, subject = node.name, str(node.target), ""
        elif kind is Kind.OUTPUT:
            name, subject, shown = "output", "", [value_of(n) for n in node.all_input_nodes]
        tensors = list(tensors_of(shown))
        rows = self._rows(tensors)
        shapes = tuple(self._shape(x) for x in tensors[:1])
        return Box(kind, rows, layer, name, (subject,) if subject else (), shapes)

    def _rows(self, tensors: Iterable[torch.Tensor]) -> Rows:
        names = {self._names.get(s) for x in tensors for s in symbols_of(x)}
        return Rows.ALL if "T" in names else Rows.LOGITS if "R" in names else Rows.NONE

    def _shape(self, x: torch.Tensor) -> str:
        named = {symbol: sympy.Symbol(name) for symbol, name in self._names.items()}
        return f"[{', '.join(str(expression(size).xreplace(named)) for size in x.shape)}]"


def _symbol_names(graph: Graph) -> dict[Any, str]:
    """T and R, from a selection of rows by an input; else T, the symbol met most often."""
    for node in graph.nodes:
        if node.target is operator.getitem or operator_name(node) == "index_select":
            source, out = [value_of(n) for n in (*node.all_input_nodes[:1], node)][-2:]
            for rows in _indices(node):
                if not all(isinstance(x, torch.Tensor) for x in (source, out)):
                    continue
                sizes = zip(source.shape, out.shape, strict=False)
                changed = [expression(a) for a, b in sizes if expression(a) != expression(b)]
                if len(changed) == 1 and isinstance(changed[0], sympy.Symbol):
                    return {changed[0]: "T", expression(rows.shape[0]): "R"}
    counts = collections.Counter(
        s for node in graph.nodes for x in tensors_of(value_of(node)) for s in symbols_of(x)
    )
    return {symbol: "T" for symbol, _ in counts.most_common(1)}


def _indices(node: Node) -> list[torch.Tensor]:
    """Vectors of indices that an indexing node is given as inputs of the graph."""
    given = [a for a in tree_leaves(node.args[1:]) if isinstance(a, Node) and a.op == "placeholder"]
    values = [value_of(a) for a in given]
    return [x for x in values if isinstance(x, torch.Tensor) and x.dim() == 1]


def _largest(node: Node, mutated: set[int]) -> list[torch.Tensor]:
    """Of what a node writes, the tensor of most dimensions: the keys, not their places."""
    given = [x for n in node.all_input_nodes for x in tensors_of(value_of(n))]
    return sorted((x for x in given if storage(x) not in mutated), key=lambda x: -x.dim())[:1]


def _plain(name: str) -> str:
    """A node's name without what Dynamo adds: hidden_states for hidden_states_26."""
    if name.startswith("l_"):
        return re.sub(r"^l_(kwargs_|self_)?|_+$", "", name)
    return re.sub(r"_\d+$", "", name)


def _merged(boxes: list[Box], sources: list[tuple[int, ...]]) -> Chart:
    """One box for those with the same sources and users, such as k_proj and v_proj."""
    users: list[list[int]] = [[] for _ in boxes]
    for i, found in enumerate(sources):
        for source in found:
            users[source].append(i)
    place: dict[tuple, int] = {}
    new_boxes: list[Box] = []
    new_sources: list[tuple[int, ...]] = []
    number: list[int] = []
    for i, box in enumerate(boxes):
        key = (box.kind, box.rows, box.layer, box.operator, sources[i], tuple(users[i]))
        if box.kind in (Kind.CALL, Kind.OUTPUT, Kind.WRITE) or key not in place:
            place[key] = len(new_boxes)
            new_boxes.append(box)
            new_sources.append(tuple(sorted({number[s] for s in sources[i]})))
        else:
            old = new_boxes[place[key]]
            subjects = tuple(dict.fromkeys((*old.subjects, *box.subjects)))
            shapes = (*old.shapes, *box.shapes)
            new_boxes[place[key]] = dataclasses.replace(old, subjects=subjects, shapes=shapes)
        number.append(place[key])
    return Chart(new_boxes, new_sources)
