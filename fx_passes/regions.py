"""Cut a graph into regions and compile each of them once.

    graph:  embedding, rope | layer_0(...) | layer_0(...) | ... | norm, lm_head
    pieces: rest_0            layer_0                             rest_1

Inductor compiles three pieces instead of a graph of all layers. A Python function with a line for
each piece runs them. 32 layers compile in 14 to 22 s so, by `invoke_subgraph` in 22 to 23, as one
graph in 44 (one H200's host, torch 2.11, 2026-11-20).
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from fx_passes.analysis.layer_paths import drop_path
from fx_passes.analysis.memory import may_overlap, mutated_storages, storage, touched_storages
from fx_passes.analysis.sizes import unbound_sizes
from fx_passes.analysis.values import noted, tensors_of, value_of
from fx_passes.naming import GraphName, names_of_pieces

CompilePiece = Callable[[GraphModule, Sequence[Any], GraphName | None], Callable[..., Any]]
"""Compiles a graph with its inputs; the name is that of a piece, None of a graph left whole."""


class Region:
    """Some nodes of a graph, what they read from outside, and what outside reads of them."""

    def __init__(self, path: str, nodes: list[Node]) -> None:
        self.path = path
        self.nodes = nodes
        inside = set(nodes)
        inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
        self.inputs = [*inputs, *unbound_sizes(nodes[0].graph, list(inputs))]
        self.outputs = [n for n in nodes if any(user not in inside for user in n.users)]

    def refreshed(self) -> "Region":
        """The same nodes, with the inputs that they have now: replacing a region changes others."""
        return Region(self.path, self.nodes)

    def reason_against(self) -> str | None:
        """Why it cannot become one call; None if it can.

        Something between its nodes depends on it and is needed by it, or shares memory with it.
        """
        if any(not isinstance(value_of(n), torch.Tensor) for n in self.outputs):
            return "it hands something other than a tensor to the outside"
        inside = set(self.nodes)
        tainted: set[Node] = set()
        for node in self._span():
            if node in inside:
                if any(a in tainted for a in node.all_input_nodes):
                    return f"{node.name} needs a value from outside that depends on it"
            elif any(a in inside or a in tainted for a in node.all_input_nodes):
                tainted.add(node)
            elif tainted and node in self.inputs:
                return f"its input {node.name} comes after a value that depends on it"
        read, written = touched_storages(self.nodes), mutated_storages(self.nodes)
        shown = [x for x in tensors_of(list(map(value_of, self.inputs))) if storage(x) in written]
        if any(may_overlap(a, b) for a, b in itertools.combinations(shown, 2)):
            return "two of its inputs overlap in memory that it writes"
        for node in self._span():
            if node in inside or node.op not in ("call_function", "call_method"):
                continue
            if mutated_storages([node]) & read or touched_storages([node]) & written:
                return f"{node.name} stands between its nodes and shares memory that is written"
        return None

    def _span(self) -> list[Node]:
        """All nodes of the graph from its first to its last."""
        span, node = [self.nodes[0]], self.nodes[0]
        while node is not self.nodes[-1]:
            node = node.next
            span.append(node)
        return span

    def key(self) -> str:
        """Equal for layers that compute the same function of inputs of equal geometry."""
        index: dict[Node, str] = {n: f"in{i}" for i, n in enumerate(self.inputs)}
        storages = [touched_storages([n]) for n in self.inputs]
        lines = [
            f"in{i}: {_geometry(n)} shares {[j for j in range(i) if storages[j] & storages[i]]}"
            for i, n in enumerate(self.inputs)
        ]
        for i, node in enumerate(self.nodes):
            args, kwargs = tree_map(
                lambda a: index[a] if isinstance(a, Node) else a, (node.args, dict(node.kwargs))
            )
            lines.append(f"{i} = {node.op} {_target(node)} {args} {kwargs}")
            index[node] = f"n{i}"
        lines.append("return " + ", ".join(index[n] for n in self.outputs))
        return "\n".join(lines)

    def subgraph(self) -> GraphModule:
        """The nodes as a module; placeholders stand for the inputs."""
        graph = Graph()
        new: dict[Node, Node] = {}
        for i, node in enumerate(self.inputs):
            new[node] = graph.placeholder(f"in_{i}")
            new[node].meta = dict(node.meta)
        for node in self.nodes:
            new[node] = graph.node_copy(node, lambda n: new[n])
        graph.output(tuple(new[n] for n in self.outputs))
        return GraphModule(torch.nn.Module(), graph)

    def replace_by_call(self, graph: Graph, name: str) -> None:
        """Put a call of the submodule `name` in the region's place."""
        inside = set(self.nodes)
        with graph.inserting_before(_after_inputs(self.inputs, self.nodes[0])):
            call = graph.call_module(name, tuple(self.inputs))
            call.meta["example_value"] = tuple(value_of(n) for n in self.outputs)
            values = [
                graph.call_function(operator.getitem, (call, i)) for i in range(len(self.outputs))
            ]
        for node, value in zip(self.outputs, values, strict=True):
            value.meta = dict(node.meta)
            drop_path(value)
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
        for node in reversed(self.nodes):
            graph.erase_node(node)


def _after_inputs(inputs: list[Node], first: Node) -> Node:
    """The first place at or after `first` that comes after every input."""
    remaining = set(inputs)
    node = first.graph._root.next
    while node is not first:
        remaining.discard(node)
        node = node.next
    while remaining:
        remaining.discard(node)
        node = node.next
    return node


def _target(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{target}"


def _geometry(node: Node) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        layout = f"{tuple(value.shape)} {value.stride()}"
        return f"{layout} {value.dtype} {value.device} {value.requires_grad}"
    if isinstance(value, torch.SymInt | int):
        return str(value)
    return type(getattr(value, "real_obj", value)).__name__


def compile_regions(
    gm: GraphModule, example_inputs: Sequence[Any], compile_piece: CompilePiece
) -> Callable[..., Any]:
    """Compile the called submodules of `gm`, each once, and what stands between them.

    Returns the whole as a function. A graph that calls no submodule is one piece.
    """
    if not gm.graph.find_nodes(op="call_module"):
        return compile_piece(gm, example_inputs, None)
    _outline_rest(gm)
    compiled: dict[str, Callable[..., Any]] = {}
    names = names_of_pieces(gm)
    calls = gm.graph.find_nodes(op="call_module")
    for node in calls:
        if node.target not in compiled:
            piece, name = getattr(gm, node.target), names[node.target]
            _tell_static_inputs(gm, piece, [c for c in calls if c.target == node.target])
            compiled[node.target] = _compile_isolated(piece, node, compile_piece, name)
        node.op, node.target = "call_function", compiled[node.target]
    gm.graph.lint()
    return GraphModule(gm, gm.graph).forward  # with the constants that the graph still reads


def _outline_rest(gm: GraphModule) -> None:
    """Make submodules of the runs of nodes between the calls.

    A run without results is one of them: it may write to its inputs.
    """
    runs: list[list[Node]] = [[]]
    for node in gm.graph.nodes:
        if node.op == "call_module":
            runs.append([])
        elif node.op in ("call_function", "call_method") and not _hands_out(node):
            runs[-1].append(node)
    for i, nodes in enumerate(run for run in runs if run):
        region = Region(f"rest_{i}", nodes)
        gm.add_module(region.path, region.subgraph())
        region.replace_by_call(gm.graph, region.path)


def _tell_static_inputs(gm: GraphModule, piece: GraphModule, calls: list[Node]) -> None:
    """Hand on which inputs keep their address, as Dynamo told it of the inputs of `gm`.

    AOTAutograd reads it from nodes and attributes of a graph of Dynamo. Without it Inductor's CUDA
    graphs ("reduce-overhead") copy every weight before each replay.
    """
    piece.meta.update({k: v for k, v in gm.meta.items() if k == "dynamo_compile_id"})
    vars(piece)["_param_name_to_source"] = {}
    for i, node in enumerate(piece.graph.find_nodes(op="placeholder")):
        node._dynamo_source = None
        node.meta["tensor_dict"] = {}
        if all(_is_static(call.args[i]) for call in calls):
            node.meta["tensor_dict"]["_dynamo_static_input_type"] = "unguarded"


def _is_static(node: Any) -> bool:
    """Whether an argument keeps its address, and is aligned as kernels for static inputs assume."""
    told, value = node.op == "placeholder" and noted(node, "tensor_dict"), value_of(node)
    if not told or not told.get("_dynamo_static_input_type") or not isinstance(value, torch.Tensor):
        return False
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.element_size() % 16 == 0


def _hands_out(node: Node) -> bool:
    """Whether the node only takes one result of a call apart."""
    return node.target is operator.getitem and cast(Node, node.args[0]).op == "call_module"


def _compile_isolated(
    piece: GraphModule, call: Node, compile_piece: CompilePiece, name: GraphName
) -> Callable[..., Any]:
    """Compile one piece as a graph of its own: AOTAutograd keeps state in the tracing context."""
    inputs = [value_of(n) for n in call.all_input_nodes]
    fake_mode = detect_fake_mode([x for x in inputs if isinstance(x, torch.Tensor)])
    with tracing(TracingContext(fake_mode)):
        compiled = compile_piece(piece, inputs, name)

    # Wrapped: FX prints a function of torch by its module path, where this one does not stand.
    def run(*args: Any) -> Any:
        return compiled(*args)

    return run
