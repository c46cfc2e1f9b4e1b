"""Compile equal layers once: each layer's part of the Dynamo graph becomes a call of one shared subgraph."""

import operator
import re
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from fx_passes.base import Pass

_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")
"""A module path up to its first number, as in `model.layers.3`: Transformers and torchvision name layers like that."""


class OutlineLayers(Pass):
    """Replace repeated layers by calls of one subgraph (`invoke_subgraph`), which Inductor then compiles once.

    Before::

        q = linear(x, layers_0_q); ...; y = add(x, o)
        q_1 = linear(y, layers_1_q); ...; y_1 = add(y, o_1)

    After::

        y = invoke_subgraph(layer, "layer", x, layers_0_q, ...)[0]
        y_1 = invoke_subgraph(layer, "layer", y, layers_1_q, ...)[0]

    Layers are told apart by the module path that Dynamo records, and taken for equal when their nodes, constants and
    input shapes are the same; weights and KV caches are inputs, so no layer index is left (ARCHITECTURE 2.6).

    Skipped when:
        - fewer than two layers are equal;
        - a node outside the layer depends on it and is needed inside it, so that the layer cannot be cut out;
        - training: an input requires grad.
    """

    name = "outline_layers"
    stage = "dynamo"

    def apply(self, graph: Graph) -> int:
        owner = graph.owning_module
        if any(_requires_grad(n) for n in graph.nodes if n.op == "placeholder") and torch.is_grad_enabled():
            self.skip("training: an input requires grad")
            return 0
        groups: dict[str, list[_Region]] = {}
        for region in _regions(graph):
            reason = region.reason_against()
            if reason:
                self.skip(f"{region.path}: {reason}")
                continue
            groups.setdefault(region.key(), []).append(region)
        count = 0
        for regions in groups.values():
            if len(regions) < 2:
                self.skip(f"{regions[0].path}: no other layer is equal to it")
                continue
            name = f"layer_{sum(hasattr(owner, f'layer_{i}') for i in range(len(groups)))}"
            setattr(owner, name, _Region(regions[0].path, regions[0].nodes).subgraph())
            for region in regions:  # made anew: replacing one changes the inputs of the next
                _Region(region.path, region.nodes).replace_by_call(graph, name)
            count += len(regions)
        return count


def _requires_grad(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _layer_path(node: Node) -> str | None:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = re.sub(r"\[(['\"]?)(\w+)\1\]", r".\2", list(stack.values())[-1][0])
    match = _LAYER.match(path)
    return match.group(1) if match else None


def _regions(graph: Graph) -> Iterator["_Region"]:
    by_path: dict[str, list[Node]] = {}
    for node in graph.nodes:
        path = _layer_path(node) if node.op in ("call_function", "call_method") else None
        if path is not None:
            by_path.setdefault(path, []).append(node)
    for path, nodes in by_path.items():
        yield _Region(path, nodes)


class _Region:
    """The nodes of one layer, what they read from outside, and what outside reads of them."""

    def __init__(self, path: str, nodes: list[Node]) -> None:
        self.path = path
        self.nodes = nodes
        inside = set(nodes)
        self.inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        self.outputs = [n for n in nodes if any(user not in inside for user in n.users)]

    def reason_against(self) -> str | None:
        """Why it cannot be cut out: something between its first and last node hangs on it."""
        inside, tainted = set(self.nodes), set()
        node, last = self.nodes[0], self.nodes[-1]
        while node is not last:
            if node not in inside and any(a in inside or a in tainted for a in node.all_input_nodes):
                tainted.add(node)
            elif node in inside and any(a in tainted for a in node.all_input_nodes):
                return f"{node.name} needs a value from outside that depends on the layer"
            node = node.next
        if any(not isinstance(n.meta.get("example_value"), torch.Tensor) for n in self.outputs):
            return "it hands something other than a tensor to the outside"
        return None

    def key(self) -> str:
        """Equal for layers that compute the same function of inputs of equal geometry."""
        index: dict[Node, str] = {n: f"in{i}" for i, n in enumerate(self.inputs)}
        lines = [f"in{i}: {_geometry(n)}" for i, n in enumerate(self.inputs)]
        for i, node in enumerate(self.nodes):
            args, kwargs = tree_map(lambda a: index[a] if isinstance(a, Node) else a, (node.args, dict(node.kwargs)))
            lines.append(f"{i} = {node.op} {_target(node)} {args} {kwargs}")
            index[node] = f"n{i}"
        lines.append("return " + ", ".join(index[n] for n in self.outputs))
        return "\n".join(lines)

    def subgraph(self) -> GraphModule:
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
        """Put the call where the region's last node stands; what stood between and hangs on it follows."""
        inside = set(self.nodes)
        with graph.inserting_before(_after_inputs(self.inputs, self.nodes[0])):
            body = graph.get_attr(name)
            call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, name, *self.inputs))
            call.meta["example_value"] = tuple(n.meta["example_value"] for n in self.outputs)
            values = [graph.call_function(operator.getitem, (call, i)) for i in range(len(self.outputs))]
        for node, value in zip(self.outputs, values, strict=True):
            value.meta = {k: v for k, v in node.meta.items() if k != "nn_module_stack"}
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
        for node in reversed(self.nodes):
            graph.erase_node(node)


def _after_inputs(inputs: list[Node], first: Node) -> Node:
    """The first place at or after `first` at which every input stands before."""
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
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device} {value.requires_grad}"
    if isinstance(value, torch.SymInt | int):
        return str(value)
    return type(getattr(value, "real_obj", value)).__name__
