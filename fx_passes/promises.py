"""What a pass must keep: shapes, strides and dtypes of a graph's outputs, and its writes in order.

Checked on the ATen graph, whose nodes all note their values.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.memory import mutated_arguments, mutated_names
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import tensors_of, value_of

_OWN = ("aten", "prims", "attn_ops")
"""Namespaces of operators that can be run on fake tensors."""


class Promises:
    """A graph as it was before a pass.

    Nodes that the pass changed, and what depends on them, are computed anew on fake tensors. The
    others keep their values, so a check costs little.
    """

    def __init__(self, graph: Graph) -> None:
        self.values = {node: value_of(node) for node in graph.nodes}
        self._calls = {node: _call(node) for node in graph.nodes}
        self._outputs = [self.values.get(x) if isinstance(x, Node) else x for x in _returned(graph)]
        self._writes = _writes(graph)

    def check(self, graph: Graph) -> None:
        """Compare with the graph as it is now.

        Raises:
            ValueError: an output, a write or a node is not what it must be.
        """
        if (writes := _writes(graph)) != self._writes:
            raise ValueError(f"the graph must write {self._writes} in this order, got {writes}")
        values, returned = self._recomputed(graph), _returned(graph)
        if len(returned) != len(self._outputs):
            raise ValueError(
                f"the graph must return {len(self._outputs)} values, got {len(returned)}"
            )
        for i, (node, wanted) in enumerate(zip(returned, self._outputs, strict=True)):
            got = values.get(node) if isinstance(node, Node) else node
            if not _is_same(got, wanted):
                raise ValueError(
                    f"output {i} of the graph must be {_in_words(wanted)}, got {_in_words(got)}"
                )

    def _recomputed(self, graph: Graph) -> dict[Node, Any]:
        """By node, its value; None where it cannot be told."""
        values: dict[Node, Any] = {}
        kept: set[Node] = set()
        with _fake_mode(graph) as mode:
            for node in graph.nodes:
                known = self._calls.get(node) == _call(node)
                if known and kept.issuperset(node.all_input_nodes):
                    values[node] = self.values[node]
                elif mode is None or node.op != "call_function":
                    values[node] = value_of(node)
                else:
                    values[node] = _computed(node, values, must=not known)
                if node in self.values and _is_same(values[node], self.values[node]):
                    kept.add(node)
        return values


def _call(node: Node) -> tuple[Any, ...]:
    return node.op, node.target, node.args, node.kwargs


def _returned(graph: Graph) -> list[Any]:
    """What the output node holds, flat."""
    return tree_leaves([node.args for node in graph.find_nodes(op="output")])


def _writes(graph: Graph) -> list[tuple[str, ...]]:
    """Operators that write to inputs of the graph, with their names, in order."""
    found = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and mutated_names(node.target):
            inputs = [a.name for a in mutated_arguments(node) if a.op == "placeholder"]
            if inputs:
                found.append((str(node.target), *inputs))
    return found


@contextlib.contextmanager
def _fake_mode(graph: Graph) -> Iterator[FakeTensorMode | None]:
    """Compute on fake tensors inside, without a guard; None where the graph has none."""
    inputs = tensors_of([value_of(node) for node in graph.find_nodes(op="placeholder")])
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield mode


def _computed(node: Node, values: dict[Node, Any], must: bool) -> Any:
    """The node's value; None where it cannot be told.

    Raises:
        ValueError: its operator refuses its arguments, and it `must` take them.
    """
    if getattr(node.target, "namespace", "aten") not in _OWN:
        return value_of(node)
    if any(values[source] is None for source in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore
    except (NotImplementedError, torch._subclasses.fake_tensor.UnsupportedFakeTensorException):
        return value_of(node)
    except Exception as error:
        if must:
            raise ValueError(f"{node.name} cannot be computed: {error}") from error
        return None


def _is_same(got: Any, wanted: Any) -> bool:
    """Whether two values have one form; what is not known is taken for the same."""
    if got is None or wanted is None:
        return True
    if isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
        same = (got.dtype, got.device, got.dim()) == (wanted.dtype, wanted.device, wanted.dim())
        return same and all(
            _equal(a, b) and (expression(a) == 1 or _equal(s, t))
            for a, b, s, t in zip(
                got.shape, wanted.shape, got.stride(), wanted.stride(), strict=True
            )
        )
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(wanted) and all(map(_is_same, got, wanted))
    return isinstance(got, torch.Tensor) == isinstance(wanted, torch.Tensor)


def _equal(a: Any, b: Any) -> bool:
    first, second = expression(a), expression(b)
    return first == second or sympy.expand(first - second) == 0


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} of strides {list(value.stride())} on {value.device}"
