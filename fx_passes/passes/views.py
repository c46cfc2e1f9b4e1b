"""Let q, k and v reach attention as plain views of the projection that computed them."""

import operator
from typing import cast

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import (
    ATTENTION,
    PRODUCTS,
    QUANTIZED,
    VIEWS,
    WITH_LSE,
    aten,
    returned,
)
from fx_passes.analysis.row_count import RowCount
from fx_passes.analysis.sizes import equal, expression, is_contiguous
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass

_WRITTEN_WHOLE = PRODUCTS | (set(ATTENTION) - WITH_LSE) | {aten.cat.default}
"""Producers of contiguous tensors in their own memory; chains that start elsewhere stay."""

_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}

_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
"""Operators whose results share the storage of their first argument."""


class CollapseViews(Pass):
    """Replace a chain of views of a product, an attention or a concatenation by one view.

    Copies that change nothing are dropped. Parts of a split are views too.

    Model code takes a projection through slice, view and transpose before attention. Inductor
    follows such a chain step by step. A step that reshapes a strided tensor makes it guard on more
    than one token (`_compute_stride`, torch 2.11 to 2.13). The first decode step of one request
    then recompiles. One view needs no guard.

    Before::

        T: int; x: f32[T, 8]; w: f32[8, 12]
        mm = aten.mm(x, w)
        k = aten.slice.Tensor(mm, 1, 4, 8); view = aten.view(k, [1, T, 2, 2])
        permute = aten.permute(view, [0, 2, 1, 3])
        return permute

    After::

        mm = aten.mm(x, w)
        as_strided_default = aten.as_strided(mm, [1, 2, T, 2], [1, 2, 12, 1], 4)
        return as_strided_default

    Skipped when:
        - the chain's shape or stride is neither a number nor a multiple of the row count;
        - the chain is one step that Inductor takes without a guard;
        - the copy leaves the graph: the caller asked for a tensor of its own.
    """

    name = "collapse_views"
    stage = "aten"
    looks_for = "chain of views that one view replaces"

    def apply(self, graph: Graph) -> int:
        return sum(
            self._drop_copy(graph, n)
            for n in graph.find_nodes(op="call_function", target=aten.clone.default)
        ) + (sum(self._collapse(graph, node) for node in list(graph.nodes) if _ends_chain(node)))

    def _drop_copy(self, graph: Graph, node: Node) -> bool:
        """Drop a clone that keeps the strides: nothing mutates its source."""
        source = _source(node)
        if returned(node):  # two outputs of the graph would become one tensor
            return False
        if (
            not _is_written_whole(_root(source))
            or value_of(source).stride() != value_of(node).stride()
        ):
            return False
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        return True

    def _collapse(self, graph: Graph, node: Node) -> bool:
        root, steps = _root(node), _steps(node)
        if (
            root.op != "call_function"
            or not _is_written_whole(root)
            or not is_contiguous(value_of(root))
        ):
            return False
        value, base = value_of(node), value_of(root)
        if (
            equal(value.shape, base.shape)
            and equal(value.stride(), base.stride())
            and _offset(value, base) == 0
        ):
            node.replace_all_uses_with(root)
            return True
        if len(steps) == 1 or not any(s.target in _RESHAPES for s in steps):
            return False
        with graph.inserting_before(node):
            rows = RowCount(graph, root)
            size = [rows.argument(s) for s in value.shape]
            stride = [
                1 if type(n) is int and n == 1 else rows.argument(s)
                for n, s in zip(value.shape, value.stride(), strict=True)
            ]
            if None in size or None in stride or _offset(value, base) is None:
                rows.forget()
                self.skip(
                    f"its shape {list(value.shape)} is no number "
                    f"and no multiple of {root.name}'s row count",
                    node.name,
                )
                return False
            if is_contiguous(value) and expression(value.numel()) == expression(base.numel()):
                new = graph.call_function(aten.view.default, (root, size))
            else:
                new = graph.call_function(
                    aten.as_strided.default, (root, size, stride, _offset(value, base))
                )
        new.meta["val"] = value
        node.replace_all_uses_with(new)
        return True


def _is_written_whole(node: Node) -> bool:
    """Of an operator's results, those that are; the scales of groups may have other strides."""
    if node.target is operator.getitem:
        return cast(Node, node.args[0]).target in QUANTIZED
    return node.target in _WRITTEN_WHOLE


def _source(node: Node) -> Node:
    """The tensor that a view or a copy reads."""
    return cast(Node, node.args[0])


def _root(node: Node) -> Node:
    while _is_view(node):
        node = _source(node)
    return node


def _is_view(node: Node) -> bool:
    """Whether it shares the storage of its first argument; a split does, and each part of it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _source(node).target in _SPLITS
    return node.target in VIEWS or node.target in _SPLITS


def _steps(node: Node) -> list[Node]:
    steps = []
    while _is_view(node):
        steps.append(node)
        node = _source(node)
    return steps


def _ends_chain(node: Node) -> bool:
    return (
        _is_view(node)
        and isinstance(value_of(node), torch.Tensor)
        and not all(map(_is_view, node.users))
    )


def _offset(value: torch.Tensor, base: torch.Tensor) -> int | None:
    """Elements between the storage starts of the two; None if it is not a number."""
    end, begin = value.storage_offset(), base.storage_offset()
    return end - begin if isinstance(end, int) and isinstance(begin, int) else None
