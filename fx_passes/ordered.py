"""Refuses graphs in which a library would sum a row in an order that depends on the other rows."""

from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.values import value_of
from fx_passes.failures import RefusedError

_INNER: dict[Any, int] = {  # the argument whose last dimension is summed over
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    aten._scaled_mm.default: 0,
}
_LIBRARY = ("convolution", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "scaled_dot_product")
_FAMILIES = ("attn_ops::gated_delta", "attn_ops::kda", "attn_ops::ssd", "attn_ops::selective")


def check_ordered(graph: Graph, graph_name: str) -> None:
    """Raise unless every product of a compiled graph is one of ours, in order.

    Raises:
        RefusedError: one is left to a library, which may split its sum by the number of rows.
    """
    for node in graph.nodes:
        if node.op == "call_function" and _by_library(node):
            raise RefusedError(
                "batch_invariant must be False for a model with products that cannot be had in "
                f"order, got {node.target} {node.name!r} {_shapes(node)} in the graph "
                f"{graph_name!r}; supported: products of bfloat16 or float16 with a weight, whose "
                "inputs are a multiple of 16, on a Hopper GPU"
            )


def _by_library(node: Node) -> bool:
    if node.target in _INNER:
        rows = node.args[_INNER[node.target]]
        return not (isinstance(rows, Node) and value_of(rows).shape[-1] == 1)  # no sum at all
    name = str(getattr(node.target, "_schema", node.target)).partition("(")[0]
    return any(word in name for word in (*_LIBRARY, *_FAMILIES))


def _shapes(node: Node) -> list[list[object]]:
    values = (value_of(one) for one in node.all_input_nodes)
    return [list(value.shape) for value in values if isinstance(value, torch.Tensor)]
