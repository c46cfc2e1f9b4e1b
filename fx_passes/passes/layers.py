"""Compile equal layers once: each layer's part of the Dynamo graph calls one shared module."""

import itertools
from collections.abc import Iterator

from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import has_own_code, switches_autocast, vmapped_nodes
from fx_passes.analysis.layer_paths import layer_path
from fx_passes.analysis.own_sizes import with_own_sizes
from fx_passes.base import Pass
from fx_passes.regions import Region


class OutlineLayers(Pass):
    """Replace repeated layers by calls of one submodule, which `fx_passes.regions` compiles once.

    Before::

        x: f32[3, 8]; w_0: f32[8, 8]; w_1: f32[8, 8]
        linear = F.linear(x, w_0); relu = torch.relu(linear)  # layers.0
        linear_1 = F.linear(relu, w_1); relu_1 = torch.relu(linear_1)  # layers.1
        return relu_1

    After::

        def layer_0(in_0, in_1):
            linear = F.linear(in_0, in_1); relu = torch.relu(linear)
            return (relu,)
        layer_0 = self.layer_0(x, w_0); getitem = layer_0[0]
        layer_1 = self.layer_0(getitem, w_1); getitem_1 = layer_1[0]
        return getitem_1

    Layers are told apart by the module path that Dynamo records. Two are equal if their nodes,
    constants and input shapes are. Weights and KV caches are inputs, so no layer index is left.

    Skipped when:
        - fewer than two layers are equal;
        - a node outside the layer depends on it and is needed inside it, so that
          the layer cannot be cut out;
        - a node outside stands between the layer's and writes what it reads, or the reverse;
        - the layer hands something other than tensors, and sizes made of sizes, to the outside;
        - the graph reads a number from a tensor, as Dynamo makes of a float that has changed;
        - an operator of the graph has code of its own, as `torch.cond` has;
        - the layer is in a `torch.vmap`, or has one;
        - two inputs of the layer overlap in memory that it writes;
        - autocast begins or ends between its nodes and others;
        - training: an input requires grad.
    """

    name = "outline_layers"
    stage = "dynamo"
    needs_inference = True
    looks_for = "equal layers"

    def apply(self, graph: Graph) -> int:
        if graph.find_nodes(op="call_method", target="item"):
            self.skip("the graph reads a number from a tensor")
            return 0
        if has_own_code(graph):
            self.skip("the graph has an operator with code of its own, such as torch.cond")
            return 0
        owner = graph.owning_module
        copies = with_own_sizes(graph)
        groups: dict[str, list[Region]] = {}
        inside, vmapped = _autocasts(graph), vmapped_nodes(graph)
        for region in _regions(graph):
            reason = region.reason_against() or _cut_autocast(region, inside)
            if reason := "it is in a vmap" if vmapped & {*region.nodes} else reason:
                self.skip(reason, region.path)
                continue
            groups.setdefault(region.key(), []).append(region)
        count = 0
        for regions in groups.values():
            if len(regions) < 2:
                self.skip("no other layer is equal to it", regions[0].path)
                continue
            assert owner is not None, "the graph of the dynamo stage belongs to a module"
            name = next(n for i in itertools.count() if not hasattr(owner, n := f"layer_{i}"))
            owner.add_module(name, regions[0].refreshed().subgraph())
            for region in regions:
                region.refreshed().replace_by_call(graph, name)
            count += len(regions)
        for copied, node in copies if not count else ():
            copied.replace_all_uses_with(node)
            graph.erase_node(copied)
        return count


def _autocasts(graph: Graph) -> dict[Node, set[Node]]:
    """By node, those that begin and end the autocasts around it; they stand in their own."""
    inside: dict[Node, set[Node]] = {}
    around: set[Node] = set()
    for node in graph.nodes:
        if switches_autocast(node):
            ends = {user for user in node.users if switches_autocast(user)}
            around = around | {node, *ends}
        if around:
            inside[node] = around
        if switches_autocast(node) and not node.users:
            around = around - {node, *node.all_input_nodes}
    return inside


def _cut_autocast(region: Region, inside: dict[Node, set[Node]]) -> str | None:
    nodes = set(region.nodes)
    if any(inside.get(node, nodes) - nodes for node in region.nodes):
        return "autocast begins or ends between its nodes and others"
    return None


def _regions(graph: Graph) -> Iterator[Region]:
    by_path: dict[str, list[Node]] = {}
    for node in graph.nodes:
        path = layer_path(node) if node.op in ("call_function", "call_method") else None
        if path is not None:
            by_path.setdefault(path, []).append(node)
    for path, nodes in by_path.items():
        yield Region(path, nodes)
