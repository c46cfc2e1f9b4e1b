"""Values of a graph's nodes, computed anew on fake tensors after a pass has changed some of them.

Nodes that did not change, and read nothing that did, keep their values, so it costs little.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import sympy
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.fx.node import map_arg

from fx_passes.analysis.fake_run import run_node
from fx_passes.analysis.graph_ops import switches_autocast
from fx_passes.analysis.memory import mutated_arguments
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import tensors_of, value_of

_OWN = ("aten", "prims", "attn_ops")
"""Namespaces of operators of the ATen graph that can be run on fake tensors."""

_UNTOLD = (
    NotImplementedError, UnsupportedFakeTensorException, DynamicOutputShapeException,
    DataDependentOutputException, GuardOnDataDependentSymNode,
)  # fmt: skip
"""Errors of operators whose results fake tensors cannot tell."""


Compute = Callable[[Node, dict[Node, Any]], Any]


class Snapshot:
    """What the nodes of a graph call, and their values, before a pass.

    Attributes:
        values: by node.
    """

    def __init__(self, graph: Graph, stage: str) -> None:
        self.stage = stage
        self.values = {node: value_of(node) for node in graph.nodes}
        self._calls = {node: _call(node) for node in graph.nodes}

    def recomputed(self, graph: Graph) -> dict[Node, Any]:
        """By node of the graph as it is now, its value; None where it cannot be told.

        Raises:
            ValueError: a node that the pass changed cannot take its arguments.
        """
        values: dict[Node, Any] = {}
        kept: set[Node] = set()
        with _computing(graph, self.stage) as compute:
            for node in graph.nodes:
                known = self._calls.get(node) == _call(node)
                if known and kept.issuperset(node.all_input_nodes):
                    values[node] = self.values[node]
                elif compute is None or node.op in ("placeholder", "get_attr", "output"):
                    values[node] = value_of(node)
                else:
                    values[node] = _told(node, values, compute, must=not known)
                if node in self.values and is_same(values[node], self.values[node]):
                    kept.add(node)
        return values


def _call(node: Node) -> tuple[Any, ...]:
    return node.op, node.target, node.args, node.kwargs


@contextlib.contextmanager
def _computing(graph: Graph, stage: str) -> Iterator[Compute | None]:
    """How nodes are computed inside, without a guard; None: they cannot be."""
    inputs = tensors_of([value_of(node) for node in graph.find_nodes(op="placeholder")])
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    if mode is None or any(switches_autocast(node) for node in graph.nodes):
        yield None
        return
    with _without_guards(mode):
        if stage == "aten":
            yield _of_aten
            return
        with enable_python_dispatcher(), torch.no_grad():
            yield _Dynamo(graph).value


@contextlib.contextmanager
def _without_guards(mode: FakeTensorMode) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def _told(node: Node, values: dict[Node, Any], compute: Compute, must: bool) -> Any:
    """The node's value; None where it cannot be told.

    Raises:
        ValueError: its operator refuses its arguments, and it `must` take them.
    """
    read = [values[source] for source in node.all_input_nodes]
    if any(value is None for value in read):
        return None
    if any(is_functorch_wrapped_tensor(x) for x in tensors_of(read)):
        return value_of(node)
    try:
        return compute(node, values)
    except _UNTOLD:
        return value_of(node)
    except Exception as error:
        if must:
            raise ValueError(f"{node.name} cannot be computed: {error}") from error
        return None


def _of_aten(node: Node, values: dict[Node, Any]) -> Any:
    if node.op != "call_function" or getattr(node.target, "namespace", "aten") not in _OWN:
        return value_of(node)
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore


class _Dynamo:
    """Nodes of a Dynamo graph, and of the submodules that it calls."""

    def __init__(self, graph: Graph) -> None:
        self.owner = graph.owning_module
        self._called: dict[Any, Any] = {}

    def value(self, node: Node, values: dict[Node, Any]) -> Any:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return value_of(node)
        if node.op == "call_module":
            return self._of_module(node, values)
        if written := mutated_arguments(node):  # not run: it would change what it writes to
            return values[written[0]] if isinstance(value_of(node), torch.Tensor) else None
        return run_node(node, values)

    def _of_module(self, node: Node, values: dict[Node, Any]) -> Any:
        """Of a call of a submodule: computed once for inputs of one form."""
        module = self.owner and self.owner.get_submodule(cast(str, node.target))
        if not isinstance(module, GraphModule):
            return value_of(node)
        given = [values[cast(Node, source)] for source in node.args]
        key = (node.target, *map(_form, given))
        if key not in self._called:
            self._called[key] = self._inside(module.graph, given)
        return self._called[key]

    def _inside(self, graph: Graph, given: list[Any]) -> Any:
        values: dict[Node, Any] = {}
        rest = iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "get_attr":
                values[node] = value_of(node)
            elif node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            else:
                values[node] = _told(node, values, self.value, must=False)
        raise AssertionError("a graph has an output")


# -- the form of values ----------------------------------------------------------------------------


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes = (tuple(map(expression, value.shape)), tuple(map(expression, value.stride())))
    return (*sizes, value.dtype, value.device)


def is_same(got: Any, wanted: Any) -> bool:
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
        return len(got) == len(wanted) and all(map(is_same, got, wanted))
    return isinstance(got, torch.Tensor) == isinstance(wanted, torch.Tensor)


def _equal(a: Any, b: Any) -> bool:
    """Whether two sizes are; one that only a run tells may be."""
    if any(free_unbacked_symbols(size) for size in (a, b) if isinstance(size, torch.SymInt)):
        return True
    first, second = expression(a), expression(b)
    return first == second or sympy.expand(first - second) == 0
