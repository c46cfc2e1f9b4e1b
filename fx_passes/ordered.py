"""What `batch_invariant` asks of a compiled graph: a row's sums have one order.

Norms become operators of ours. A graph in which a library would sum a row in an order that depends
on the other rows is refused.
"""

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import equal
from fx_passes.analysis.values import value_of
from fx_passes.failures import RefusedError
from fx_passes.passes.rms_norms import Norm, is_tensor, norm_of

_INNER: dict[Any, int] = {  # the argument whose last dimension is summed over
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    aten._scaled_mm.default: 0,
}
_LIBRARY = ("convolution", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "scaled_dot_product")
_RANKS = "c10d_functional::all_reduce"  # by an algorithm for each size
_FAMILIES = ("attn_ops::gated_delta", "attn_ops::kda", "attn_ops::ssd", "attn_ops::selective")


def order_norms(graph: Graph) -> None:
    """Each RMSNorm that no pass has taken becomes an operator, with the addition before it.

    A compiler orders its sum by the number of rows that it has seen first, and rounds less often
    where it fuses more: two sessions of a model would differ.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        norm = norm_of(node) or norm_of(node, wide_weight=True)
        if norm is None:
            continue
        terms = _terms_of(norm)
        with graph.inserting_before(node):
            if terms is None:
                args = (norm.source, norm.weight, norm.eps)
                result = graph.call_function(torch.ops.attn_ops.rms_norm.default, args)
            else:
                args = (*terms, norm.weight, norm.eps)
                both = graph.call_function(torch.ops.attn_ops.add_rms_norm.default, args)
                both.meta["val"] = (value_of(norm.source), value_of(node))
                total = graph.call_function(operator.getitem, (both, 0))
                total.meta["val"] = value_of(norm.source)
                result = graph.call_function(operator.getitem, (both, 1))
                later = [u for u in norm.source.users if place.get(u, 0) > place[node]]
                for user in later:
                    user.replace_input_with(norm.source, total)
        result.meta["val"] = value_of(node)
        node.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def _terms_of(norm: Norm) -> tuple[Node, Node] | None:
    """What is added to what the norm is of; None: it is no such sum."""
    total = norm.source
    if total.target is not aten.add.Tensor or total.kwargs or not all(map(is_tensor, total.args)):
        return None
    first, second = cast(tuple[Node, Node], total.args)
    wanted = value_of(total)
    for term in (first, second):
        value = value_of(term)
        if value.dtype != wanted.dtype or not equal(tuple(value.shape), tuple(wanted.shape)):
            return None
    return first, second


def check_ordered(graph: Graph, graph_name: str) -> None:
    """Raise unless every product of a compiled graph is one of ours, in order.

    Raises:
        RefusedError: one is left to a library, which may split its sum by the number of rows.
    """
    for node in graph.nodes:
        if node.op == "call_function" and _by_library(node):
            raise RefusedError(
                "batch_invariant must be False for a model with sums that cannot be had in "
                f"order, got {node.target} {node.name!r} {_shapes(node)} in the graph "
                f"{graph_name!r}; supported: products of bfloat16 or float16 with a weight, whose "
                "inputs are a multiple of 16, on a Hopper GPU"
            )


def _by_library(node: Node) -> bool:
    if node.target in _INNER:
        rows = node.args[_INNER[node.target]]
        return not (isinstance(rows, Node) and value_of(rows).shape[-1] == 1)  # no sum at all
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(argument.name == "ordered" for argument in schema.arguments):
        return not node.kwargs.get("ordered")  # ours, called by hand or by a model's own code
    name = str(schema or node.target).partition("(")[0]
    if name == "attn_ops::all_reduce":
        from attn_ops.ops.collectives import by_kernels

        rows, group = node.args
        return not by_kernels(value_of(cast(Node, rows)), cast(str, group))
    return any(word in name for word in (*_LIBRARY, _RANKS, *_FAMILIES))


def _shapes(node: Node) -> list[list[object]]:
    values = (value_of(one) for one in node.all_input_nodes)
    return [list(value.shape) for value in values if isinstance(value, torch.Tensor)]
