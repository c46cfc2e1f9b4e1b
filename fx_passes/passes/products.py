"""Compute each matrix product once: what reads the same input and weight shares one product."""

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.analysis.graph_ops import PRODUCTS, VIEWS, aten, returned
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass

_SHARED = PRODUCTS | {aten._scaled_mm.default}
_ALWAYS_PURE = _SHARED | VIEWS
_SEEDED = torch.Tag.nondeterministic_seeded


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
        - an operator between them writes in place, and more than views lead to the products;
        - both are returned, other than in columns of their own: the caller may write to one.
    """

    name = "share_products"
    stage = "aten"
    looks_for = "equal products"

    def apply(self, graph: Graph) -> int:
        first: dict[tuple, Node] = {}
        same: dict[Node, Node] = {}  # of each node that may be shared, the first that is equal
        matches = 0
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if _writes(node):
                first = {key: node for key, node in first.items() if node.target in _ALWAYS_PURE}
            if not _is_pure(node):
                continue
            given = map_arg((node.args, node.kwargs), lambda source: same.get(source, source))
            same[node] = first.setdefault((node.target, _freeze(given)), node)
            if node.target in _SHARED and same[node] is not node:
                if _overlap(same[node], node):
                    self.skip("both products are returned")
                    continue
                node.replace_all_uses_with(same[node])
                graph.erase_node(node)
                matches += 1
        return matches


def _overlap(first: Node, second: Node) -> bool:
    """Whether the graph returns a column of both."""
    base = value_of(first)
    mine, theirs = ([_columns(v, base) for v in returned(n)] for n in (first, second))
    return any(a < d and c < b for a, b in mine for c, d in theirs)


def _columns(node: Node, base: torch.Tensor) -> tuple[int, int]:
    """Those of a contiguous matrix that a view of it shows; all where unknown."""
    value, width = value_of(node), base.shape[-1]
    begin, strides = value.storage_offset(), value.stride()
    pairs = zip(value.shape, strides, strict=True)  # a stride that is no number is one of rows
    inner = [(n, s) for n, s in pairs if isinstance(s, int) and 0 < s < width]
    end = begin + 1 + sum((n - 1) * s for n, s in inner)
    known = isinstance(begin, int) and isinstance(end, int) and end <= width
    known = known and value.dtype == base.dtype
    return (begin, end) if known else (0, width)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_pure(node: Node) -> bool:
    """Whether a node gives the same for the same arguments, while nothing writes in place."""
    target = node.target
    if target in _ALWAYS_PURE:
        return True
    if not isinstance(target, torch._ops.OpOverload) or _writes(node):
        return False
    return target.namespace in ("aten", "prims") and _SEEDED not in target.tags


def _freeze(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    if isinstance(value, float | complex):  # 0.0 equals -0.0, but not as a divisor
        return (type(value), repr(value))
    return (type(value), value) if isinstance(value, torch.dtype | int | bool) else value
