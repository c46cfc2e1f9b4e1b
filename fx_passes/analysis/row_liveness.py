"""Which rows of the batch each value of a Dynamo graph is needed for: all, or the logits rows.

A backward dataflow. The model takes the rows whose logits are wanted out of its last hidden states
(`h[:, logits_to_keep]`). A value from which it computes them row by row is needed for those rows
alone. That ends where something mixes rows or writes to a KV cache.

Every node is run on fake tensors, and `row_rules` judges the ATen operators that it calls. So the
table need not know PyTorch's functions and methods, which are many more.

T rows of the batch, R logits rows.
"""

import dataclasses
import enum
import operator
from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.fake_run import FakeRun, NotApplicableError, namespace
from fx_passes.analysis.graph_ops import ATTENTION
from fx_passes.analysis.memory import storage
from fx_passes.analysis.row_rules import Call, why_not
from fx_passes.analysis.row_selection import Selection, find_selections, row_symbol
from fx_passes.analysis.sizes import expression, mentions, multiple, row_dim
from fx_passes.analysis.values import tensors_of, value_of


class Need(enum.IntEnum):
    """Which rows of a value somebody reads."""

    NONE = 0
    LOGITS = 1
    ALL = 2


@dataclasses.dataclass
class Liveness:
    """What is known of a graph's rows.

    Attributes:
        symbol: T in the shapes.
        selections: all of one tensor of indices.
        need: by node; NONE for nodes whose value nobody reads.
        region: nodes that can be computed for the logits rows alone.
        reasons: why a node of which only logits rows are needed is computed for all: where the
            region ends.
        calls: the ATen calls of each node.
        rewritten: storages that some node writes to, by the nodes that hold a view of it.
    """

    symbol: sympy.Symbol
    selections: list[Selection]
    need: dict[Node, Need]
    region: set[Node]
    reasons: dict[Node, str]
    calls: dict[Node, list[Call]]
    rewritten: list[set[Node]]

    @property
    def indices(self) -> Node:
        return self.selections[0].indices

    def dim(self, node: Node) -> int | None:
        """The row dimension of a node's tensor."""
        return row_dim(value_of(node), self.symbol)

    def num_attentions(self) -> tuple[int, int]:
        """Attentions of the region, and of the graph."""
        found = [node for node in self.need if node.target in ATTENTION]
        return sum(node in self.region for node in found), len(found)


def analyse(graph: Graph) -> Liveness:
    """Find the region that only the logits rows need.

    Raises:
        NotApplicableError: no rows are selected, or by several tensors, or nothing can be dropped.
    """
    values = FakeRun(graph)
    selections = find_selections(values)
    symbol = row_symbol(selections, values)
    calls = {
        node: [Call(*call, symbol=symbol) for call in found] for node, found in values.calls.items()
    }
    chosen = {s.node: s for s in selections}
    reasons = {
        node: reason
        for node in calls
        if node not in chosen and (reason := _reason(node, calls[node], values, symbol))
    }
    groups = _rewritten(values, calls)
    need = _needs(graph, values, symbol, reasons, chosen, groups)
    region = _region(graph, values, calls, symbol, need, reasons, chosen)
    ends = {
        node: reason
        for node, reason in reasons.items()
        if any(user in region or user in chosen for user in node.users)
    }
    if not any(s.source in region for s in selections):
        node = selections[-1].source
        reason = reasons.get(node, "all its rows are read")
        raise NotApplicableError(f"{node.name} ({_name(node)}) is needed for all rows: {reason}")
    return Liveness(symbol, selections, need, region, ends, calls, groups)


# -- what keeps rows apart -------------------------------------------------------------------------


def _reason(node: Node, calls: list[Call], values: FakeRun, symbol: sympy.Symbol) -> str | None:
    """Why a node mixes rows, None if it does not."""
    if node in values.failed:
        return values.failed[node]
    if node.target in ATTENTION:
        causal = node.kwargs.get("causal") is not False
        q = values.of[cast(Node, node.args[0])]
        return None if causal and _has_rows(q, symbol) else "it is not causal, or q has no rows"
    touched = [x for call in calls for x in (*call.inputs, *call.outputs)]
    if not any(mentions(x, symbol) for x in (*tensors_of(values.of[node]), *touched)):
        return None
    if namespace(node) == "attn_ops":
        return f"{_name(node)} reads the batch as a whole"
    for size in _sizes(node, values):
        if symbol in size.free_symbols and multiple(size, symbol) is None:
            return f"its size {size} is no multiple of the number of rows"
    if any(isinstance(values.of.get(a), torch.Size | tuple | list) for a in _sized(node, values)):
        return "it takes a shape as one value"
    for call in calls:
        if reason := why_not(call):
            return f"{call.op}: {reason}"
    return None


def _results(value: Any, calls: Sequence[Call]) -> list[torch.Tensor]:
    """Tensors that a node gives or writes to: `x[i] = y` gives nothing."""
    return [*tensors_of(value), *(x for call in calls for x in call.mutated)]


def _sizes(node: Node, values: FakeRun) -> list[sympy.Expr]:
    found = [values.of[a] for a in node.all_input_nodes]
    return [expression(x) for x in found if isinstance(x, torch.SymInt)]


def _sized(node: Node, values: FakeRun) -> list[Node]:
    """Arguments that are sizes, not tensors, and not one number."""
    return [
        a
        for a in node.all_input_nodes
        if isinstance(values.of.get(a), torch.Size | tuple | list)
        and any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(values.of[a]))
    ]


def _rewritten(values: FakeRun, calls: dict[Node, list[Call]]) -> list[set[Node]]:
    """For every storage that some node writes to, the nodes that hold a view of it or write it.

    What is one memory has rows of one kind.
    """
    written = {storage(x) for found in calls.values() for call in found for x in call.mutated}
    groups: dict[int, set[Node]] = {key: set() for key in written}
    for node, value in values.of.items():
        touched = {storage(x) for x in tensors_of(value)}
        touched |= {storage(x) for call in calls.get(node, ()) for x in call.mutated}
        for key in touched & written:
            groups[key].add(node)
    return list(groups.values())


# -- who needs what --------------------------------------------------------------------------------


def _needs(
    graph: Graph,
    values: FakeRun,
    symbol: sympy.Symbol,
    reasons: dict[Node, str],
    selections: dict[Node, Selection],
    groups: Sequence[set[Node]],
) -> dict[Node, Need]:
    """Backwards until nothing changes: members of a rewritten storage raise one another."""
    need = dict.fromkeys(graph.nodes, Need.NONE)
    in_place = set().union(*groups)
    for node in graph.nodes:
        # What nobody uses may be there for what it does, as an assertion; it is left as it was.
        unused = node.op in ("call_function", "call_method") and not node.users
        if node.op == "output" or (unused and node not in in_place):
            need[node] = Need.ALL
    for group in groups:
        if any(node.op in ("placeholder", "get_attr") for node in group):  # a cache, or a buffer
            need.update((node, Need.ALL) for node in group)
    while True:
        before = dict(need)
        for node in reversed(graph.nodes):
            _ask_inputs(node, need, values, symbol, reasons, selections)
        for group in groups:
            most = max(need[node] for node in group)
            mixed = any(node in reasons and need[node] for node in group)
            need.update((node, Need.ALL if mixed else most) for node in group)
        if need == before:
            return need


def _ask_inputs(
    node: Node,
    need: dict[Node, Need],
    values: FakeRun,
    symbol: sympy.Symbol,
    reasons: dict[Node, str],
    selections: dict[Node, Selection],
) -> None:
    asked = need[node]
    if asked is Need.NONE:
        return
    keeps = asked is Need.LOGITS and node not in reasons
    for source in node.all_input_nodes:
        wanted = Need.ALL
        selected = node in selections and source is selections[node].source
        queries = node.target not in ATTENTION or source is node.args[0]
        if ((keeps and queries) or selected) and _has_rows(values.of.get(source), symbol):
            wanted = Need.LOGITS
        need[source] = max(need[source], wanted)


def _has_rows(value: Any, symbol: sympy.Symbol) -> bool:
    """Whether every tensor of a value has one row dimension; such a value can be gathered."""
    found = list(tensors_of(value))
    try:
        return bool(found) and all(row_dim(x, symbol) is not None for x in found)
    except ValueError:
        return False


def _region(
    graph: Graph,
    values: FakeRun,
    calls: dict[Node, list[Call]],
    symbol: sympy.Symbol,
    need: dict[Node, Need],
    reasons: dict[Node, str],
    selections: dict[Node, Selection],
) -> set[Node]:
    """Nodes of which logits rows are needed only, and which can be computed for those alone.

    An entry of a tuple goes with its tuple.
    """
    region: set[Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or node in reasons:
            continue
        if need[node] is not Need.LOGITS or node in selections:
            continue
        if not _has_rows(_results(values.of[node], calls[node]), symbol):
            continue
        entry = node.target is operator.getitem and isinstance(node.args[0], Node)
        if entry and isinstance(values.of[node.args[0]], tuple | list):  # type: ignore
            if node.args[0] in region:
                region.add(node)
            continue
        region.add(node)
    return region


def _name(node: Node) -> str:
    return (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
