"""What a pass must keep: forms of a graph's outputs, and its writes in their order.

Checked after each pass with `options={"check_passes": True}`, and in the tests of this repository.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.fake_run import run_node
from fx_passes.analysis.graph_ops import operator_name, switches_autocast
from fx_passes.analysis.memory import mutated_arguments, storage
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import tensors_of, value_of

Write = tuple[Node, str, tuple[str, ...]]
"""A node that writes, what it calls, and the inputs of the graph that it writes to."""


class Promises:
    """A graph as it was before a pass."""

    def __init__(self, graph: Graph, stage: str) -> None:
        self._stage = stage
        self._values = {node: value_of(node) for node in graph.nodes}
        self._calls = {node: _call(node) for node in graph.nodes}
        self._outputs = _outputs(graph, self._values)
        self._writes = self._ordered(graph)

    def check(self, graph: Graph) -> None:
        """Compare with the graph as it is now.

        Raises:
            ValueError: an output or a write is not what it must be.
        """
        wanted, written = ([write[1:] for write in self._writes], self._ordered(graph))
        if (got := [write[1:] for write in written]) != wanted:
            # `node` is named by the error: the first that does not write what it must.
            pairs = zip(written, wanted, strict=False)
            node = next((write[0] for write, one in pairs if write[1:] != one), None)
            raise ValueError(f"the graph must write {wanted} in this order, got {got}")
        outputs = _outputs(graph, self._recomputed(graph))
        if len(outputs) != len(self._outputs):
            raise ValueError(
                f"the graph must return {len(self._outputs)} values, got {len(outputs)}"
            )
        triples = zip(_returned(graph), outputs, self._outputs, strict=True)
        for i, (node, got, want) in enumerate(triples):  # noqa: B007 -- the error names `node`
            if not _is_same(got, want):
                raise ValueError(
                    f"output {i} of the graph must be {_in_words(want)}, got {_in_words(got)}"
                )

    def _recomputed(self, graph: Graph) -> dict[Node, Any]:
        """By node, its value on fake tensors; None where it cannot be told.

        Nodes that did not change, and read nothing that did, keep their values.
        """
        values: dict[Node, Any] = {}
        kept: set[Node] = set()
        inputs = tensors_of([value_of(node) for node in graph.find_nodes(op="placeholder")])
        mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
        if mode is None or mode.shape_env is None or any(map(switches_autocast, graph.nodes)):
            return values
        guards, numbers = (
            mode.shape_env.suppress_guards,
            mode.shape_env.ignore_fresh_unbacked_symbols,
        )
        with mode, guards(), numbers(), enable_python_dispatcher(), torch.no_grad():
            for node in graph.nodes:
                is_call = node.op in ("call_function", "call_method")
                same = self._calls.get(node) == _call(node)
                if not is_call or (same and kept.issuperset(node.all_input_nodes)):
                    values[node] = value_of(node)
                else:
                    values[node] = self._computed(node, values)
                if node in self._values and _is_same(values[node], self._values[node]):
                    kept.add(node)
        return values

    def _computed(self, node: Node, values: dict[Node, Any]) -> Any:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return value_of(node)
        if any(values[source] is None for source in node.all_input_nodes):
            return None
        if self._stage == "dynamo" and (written := mutated_arguments(node)):
            return values[written[0]]  # not run: it would change what it writes to
        try:
            if self._stage == "dynamo":
                return run_node(node, values)
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore
        except Exception:  # what fake tensors cannot tell, Inductor will
            return None

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
        return sorted(found, key=lambda write: write[2]) if self._stage == "dynamo" else found


def _call(node: Node) -> tuple[Any, ...]:
    return node.op, node.target, node.args, node.kwargs


def _outputs(graph: Graph, values: Mapping[Node, Any]) -> list[Any]:
    """Values of what the output node holds, flat."""
    return [values.get(x) if isinstance(x, Node) else x for x in _returned(graph)]


def _returned(graph: Graph) -> list[Any]:
    return tree_leaves([node.args for node in graph.find_nodes(op="output")])


def _writes(graph: Graph, names: Mapping[int, list[str]]) -> Iterator[Write]:
    """Writes to inputs of the graph, in order; those of called submodules at the call.

    Args:
        names: of the inputs, by the memory that they live in.
    """
    for node in graph.nodes:
        if node.op == "call_module":
            yield from ((node, *write[1:]) for write in _inside(node, graph, names))
        elif node.op in ("call_function", "call_method") and not isinstance(
            node.target,
            torch._ops.HigherOrderOperator,  # it is not known what those write
        ):
            inputs = {name for a in mutated_arguments(node) for name in _named(a, names)}
            if inputs:
                overload = isinstance(node.target, torch._ops.OpOverload)
                called = str(node.target) if overload else operator_name(node)
                yield node, called, (*sorted(inputs),)


def _inside(call: Node, graph: Graph, names: Mapping[int, list[str]]) -> Iterator[Write]:
    """Writes of a called submodule, whose inputs stand for those of the graph."""
    module = graph.owning_module and graph.owning_module.get_submodule(str(call.target))
    if not isinstance(module, GraphModule):
        return
    own: dict[int, list[str]] = {}
    inputs = module.graph.find_nodes(op="placeholder")
    for inner, given in zip(inputs, call.all_input_nodes, strict=False):
        for x in tensors_of(value_of(inner)):
            own.setdefault(storage(x), []).extend(_named(given, names))
    yield from _writes(module.graph, own)


def _named(node: Node, names: Mapping[int, list[str]]) -> list[str]:
    """The inputs that share memory with a node."""
    found = [name for x in tensors_of(value_of(node)) for name in names.get(storage(x), [])]
    return found or [node.name] * (node.op == "placeholder")


def _is_same(got: Any, wanted: Any) -> bool:
    """Whether two values have one form; what is not known is taken for the same."""
    if got is None or wanted is None:
        return True
    if isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
        same = (got.dtype, got.device, got.dim()) == (wanted.dtype, wanted.device, wanted.dim())
        shapes = zip(got.shape, wanted.shape, got.stride(), wanted.stride(), strict=same)
        return same and all(
            _equal(a, b) and (expression(a) == 1 or _equal(s, t)) for a, b, s, t in shapes
        )
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(wanted) and all(map(_is_same, got, wanted))
    return isinstance(got, torch.Tensor) == isinstance(wanted, torch.Tensor)


def _equal(a: Any, b: Any) -> bool:
    """Whether two sizes are; one that only a run tells may be."""
    if any(free_unbacked_symbols(size) for size in (a, b) if isinstance(size, torch.SymInt)):
        return True
    return sympy.expand(expression(a) - expression(b)) == 0


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} of strides {list(value.stride())} on {value.device}"
