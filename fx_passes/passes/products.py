"""Compute each matrix product once: what reads the same input and weight shares one product."""

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.analysis.graph_ops import PRODUCTS, VIEWS, aten
from fx_passes.base import Pass

_SHARED = PRODUCTS | {aten._scaled_mm.default}
_ALWAYS_PURE = _SHARED | VIEWS


class ShareProducts(Pass):
    """Merge equal matrix products, and what equally leads to them.

    `attn_ops.integrations.merged.merge_projections` makes q, k and v slices of one product, and
    gate and up of another. Every slice is traced with a copy of its product. This pass leaves one.
    What no product is left to read goes with it, such as a quantization of x; equal nodes that lead
    to none stay.

    Before::

        T: int; x: f32[1, T, 8]; w: f32[8, 12]
        view = aten.view(x, [T, 8]); mm = aten.mm(view, w)
        q = aten.slice.Tensor(mm, 1, 0, 8)
        view_1 = aten.view(x, [T, 8]); mm_1 = aten.mm(view_1, w)
        k = aten.slice.Tensor(mm_1, 1, 8, 12)
        return (q, k)

    After::

        view = aten.view(x, [T, 8]); mm = aten.mm(view, w)
        q = aten.slice.Tensor(mm, 1, 0, 8)
        k = aten.slice.Tensor(mm, 1, 8, 12)
        return (q, k)

    Skipped when:
        - the products differ in any argument;
        - an operator of the graph writes in place, and more than views lead to the products.
    """

    name = "share_products"
    stage = "aten"
    looks_for = "equal products"

    def apply(self, graph: Graph) -> int:
        first: dict[tuple, Node] = {}
        same: dict[Node, Node] = {}  # of each product and view, the first that is equal
        matches = 0
        pure = _pure_targets(graph)
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in pure:
                continue
            given = map_arg((node.args, node.kwargs), lambda source: same.get(source, source))
            same[node] = first.setdefault((node.target, _freeze(given)), node)
            if node.target in _SHARED and same[node] is not node:
                node.replace_all_uses_with(same[node])
                graph.erase_node(node)
                matches += 1
        return matches


def _pure_targets(graph: Graph) -> frozenset:
    """Operators of the graph that give the same for the same arguments."""
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    operators = [target for target in called if isinstance(target, torch._ops.OpOverload)]
    if any(target._schema.is_mutable for target in operators):
        return _ALWAYS_PURE
    seeded = torch.Tag.nondeterministic_seeded
    pure = {t for t in operators if t.namespace in ("aten", "prims") and seeded not in t.tags}
    return _ALWAYS_PURE | pure


def _freeze(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    return (type(value), value) if isinstance(value, torch.dtype | int | float | bool) else value
