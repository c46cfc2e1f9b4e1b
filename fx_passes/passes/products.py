"""Compute each matrix product once: what reads the same input and weight shares one product."""

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.analysis.graph_ops import PRODUCTS, VIEWS
from fx_passes.base import Pass

_PURE = PRODUCTS | VIEWS


class ShareProducts(Pass):
    """Merge equal matrix products, and the views that lead to them.

    `attn_ops.integrations.merged.merge_projections` makes q, k and v slices of one product, and
    gate and up of another. Every slice is traced with a copy of its product. This pass leaves one.
    Views that no product is left to read go with it; equal views that lead to none stay.

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
        - the products differ in any argument.
    """

    name = "share_products"
    stage = "aten"
    looks_for = "equal products"

    def apply(self, graph: Graph) -> int:
        first: dict[tuple, Node] = {}
        same: dict[Node, Node] = {}  # of each product and view, the first that is equal
        matches = 0
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _PURE:
                continue
            given = map_arg((node.args, node.kwargs), lambda source: same.get(source, source))
            same[node] = first.setdefault((node.target, _freeze(given)), node)
            if node.target in PRODUCTS and same[node] is not node:
                node.replace_all_uses_with(same[node])
                graph.erase_node(node)
                matches += 1
        return matches


def _freeze(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    return (type(value), value) if isinstance(value, torch.dtype | int | float | bool) else value
