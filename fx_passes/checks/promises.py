"""What a pass must keep: forms of a graph's outputs, and its writes in their order."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.graph_ops import operator_name
from fx_passes.analysis.memory import mutated_arguments, storage
from fx_passes.analysis.values import tensors_of, value_of
from fx_passes.checks.recompute import Snapshot, is_same

Write = tuple[Node, str, tuple[str, ...]]
"""A node that writes, what it calls, and the inputs of the graph that it writes to."""


class Promises:
    """A graph as it was before a pass."""

    def __init__(self, graph: Graph, stage: str) -> None:
        self.stage = stage
        self._before = Snapshot(graph, stage)
        values = self._before.values
        self._outputs = [values.get(x) if isinstance(x, Node) else x for x in _returned(graph)]
        self._writes = self._ordered(graph)

    def check(self, graph: Graph) -> None:
        """Compare with the graph as it is now.

        Raises:
            ValueError: an output, a write or a node is not what it must be.
        """
        self._check_writes(graph)
        values, returned = self._before.recomputed(graph), _returned(graph)
        if len(returned) != len(self._outputs):
            raise ValueError(
                f"the graph must return {len(self._outputs)} values, got {len(returned)}"
            )
        for i, (node, wanted) in enumerate(zip(returned, self._outputs, strict=True)):
            got = values.get(node) if isinstance(node, Node) else node
            if not is_same(got, wanted):
                raise ValueError(
                    f"output {i} of the graph must be {_in_words(wanted)}, got {_in_words(got)}"
                )

    def _check_writes(self, graph: Graph) -> None:
        wanted, got = ([write[1:] for write in one] for one in (self._writes, self._ordered(graph)))
        if got != wanted:
            # `node` is named by the error: the first that does not write what it must.
            pairs = zip(self._ordered(graph), wanted, strict=False)
            node = next((write[0] for write, one in pairs if write[1:] != one), None)  # noqa: F841
            raise ValueError(f"the graph must write {wanted} in this order, got {got}")

    def _ordered(self, graph: Graph) -> list[Write]:
        """In order. In the Dynamo graph a layer that is cut out moves over writes to other memory:
        there the order is kept of each input.
        """
        names: dict[int, list[str]] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                for x in tensors_of(value_of(node)):
                    names.setdefault(storage(x), []).append(node.name)
        found = list(_writes(graph, names))
        return sorted(found, key=lambda write: write[2]) if self.stage == "dynamo" else found


def _returned(graph: Graph) -> list[Any]:
    """What the output node holds, flat."""
    return tree_leaves([node.args for node in graph.find_nodes(op="output")])


def _writes(graph: Graph, names: Mapping[int, list[str]]) -> Iterator[Write]:
    """Writes to inputs of the graph, in order; those of called submodules stand at the call.

    Args:
        names: of the inputs, by the memory that they live in.
    """
    for node in graph.nodes:
        if node.op == "call_module":
            yield from ((node, *write[1:]) for write in _inside(node, graph, names))
        elif node.op in ("call_function", "call_method") and not _is_higher_order(node):
            inputs = {name for a in mutated_arguments(node) for name in _named(a, names)}
            if inputs:
                overload = isinstance(node.target, torch._ops.OpOverload)
                yield (
                    node,
                    str(node.target) if overload else operator_name(node),
                    (*sorted(inputs),),
                )


def _inside(call: Node, graph: Graph, names: Mapping[int, list[str]]) -> Iterator[Write]:
    """Writes of a called submodule, whose inputs stand for those of the graph."""
    module = graph.owning_module and graph.owning_module.get_submodule(str(call.target))
    if not isinstance(module, GraphModule):
        return
    own: dict[int, list[str]] = {}
    for inner, given in zip(
        module.graph.find_nodes(op="placeholder"), call.all_input_nodes, strict=False
    ):
        for x in tensors_of(value_of(inner)):
            own.setdefault(storage(x), []).extend(_named(given, names))
    yield from _writes(module.graph, own)


def _named(node: Node, names: Mapping[int, list[str]]) -> list[str]:
    """The inputs that share memory with a node."""
    found = [name for x in tensors_of(value_of(node)) for name in names.get(storage(x), [])]
    return found or [node.name] * (node.op == "placeholder")


def _is_higher_order(node: Node) -> bool:
    """Whether it calls a graph of its own, of which it is not known what it writes."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} of strides {list(value.stride())} on {value.device}"
