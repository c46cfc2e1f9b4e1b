"""A Dynamo graph run on fake tensors, with the ATen operators that each node calls."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fx_passes.analysis.graph_ops import ATTENTION, WITH_LSE
from fx_passes.analysis.memory import mutated_names
from fx_passes.analysis.values import tensors_of, value_of


class NotApplicableError(Exception):
    """Why a graph has no rows that could be dropped."""


class _Calls(TorchDispatchMode):
    """Notes the ATen calls that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found.append((func, args, kwargs or {}, out))
        return out


class FakeRun:
    """A Dynamo graph run on fake tensors.

    Attributes:
        of: value of each node.
        calls: ATen calls of each node that is no input.
        failed: nodes that could not be run, and why; their value is the one Dynamo noted.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[Node, Any] = {}
        self.calls: dict[Node, list[tuple[Any, tuple, dict, Any]]] = {}
        self.failed: dict[Node, str] = {}
        with fake_execution(graph):
            for node in graph.nodes:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.of[node] = value_of(node)
        elif node.op in ("call_function", "call_method"):
            with _Calls() as calls:
                try:
                    self.of[node] = run_node(node, self.of)
                except Exception as error:  # whatever a function raises: it is not understood
                    self.of[node] = value_of(node)
                    self.failed[node] = f"it cannot be run on fake tensors: {error}"
            self.calls[node] = calls.found + _hidden_write(node, self.of)
            read = [self.of.get(a) for a in node.all_input_nodes]
            if any(is_functorch_wrapped_tensor(x) for x in tensors_of((self.of[node], read))):
                self.failed[node] = "it runs inside a vmap or a gradient"


def _hidden_write(node: Node, values: dict[Node, Any]) -> list[tuple[Any, tuple, dict, Any]]:
    """The call of an operator of ours that writes, such as to a KV cache. `run_node` leaves it."""
    if namespace(node) != "attn_ops" or not mutated_names(node.target):  # type: ignore
        return []
    args, kwargs = tree_map(
        lambda a: values[a] if isinstance(a, Node) else a, (node.args, dict(node.kwargs))
    )
    return [(node.target, args, kwargs, None)]


@contextlib.contextmanager
def fake_execution(graph: Graph) -> Iterator[None]:
    """Run nodes of the graph inside, without a guard, a gradient or a symbol that stays pending."""
    values = [value_of(n) for n in graph.find_nodes(op="placeholder")]
    # The mode of the inputs: while a backend runs, the tracing context holds another one.
    mode = next((x.fake_mode for x in tensors_of(values) if isinstance(x, FakeTensor)), None)
    if mode is None or mode.shape_env is None:
        raise NotApplicableError("its inputs have no symbolic shapes")
    guards = mode.shape_env.suppress_guards()
    numbers = mode.shape_env.ignore_fresh_unbacked_symbols()  # of `item()`
    with mode, guards, numbers, enable_python_dispatcher(), torch.no_grad():
        yield


def run_node(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a node from those of its arguments."""
    args, kwargs = tree_map(
        lambda a: values[a] if isinstance(a, Node) else a, (node.args, dict(node.kwargs))
    )
    if node.target in ATTENTION:  # metadata is no tensor, and its fake is none of torch's
        width = kwargs.get("v_head_dim", args[0].shape[2])  # of latent attention
        out = args[0].new_empty((*args[0].shape[:2], width))
        lse = args[0].new_empty(args[0].shape[:2], dtype=torch.float32)
        return (out, lse) if node.target in WITH_LSE else out
    if namespace(node) == "attn_ops":
        return value_of(node)
    if node.op == "call_method":
        assert isinstance(node.target, str)
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def namespace(node: Node) -> str | None:
    return getattr(node.target, "namespace", None)
