"""How many tokens the batches have that a graph is compiled for."""

import sys
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule

from fx_passes.analysis.graph_ops import ATTENTION, QUANTIZED
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import value_of

NO_LIMIT = sys.maxsize - 1
"""The largest count, of `range(least, sys.maxsize)`: there is no other."""


def why_outside(graph: Graph, wanted: range) -> str | None:
    """Why a graph may be called with other token counts than those of `wanted`; None: never.

    The count is that of the rows that attention is given: a number, or a symbol whose bounds are
    known. No guard is left.
    """
    sizes = list(_row_counts(graph))
    if not sizes:
        return "no attention in the graph tells the number of tokens"
    for size in sizes:
        least, most = _bounds(size)
        if least < wanted.start or most >= wanted.stop:
            only = _in_words(wanted.start, wanted.stop - 1)
            return f"the graph is for {_in_words(least, most)} tokens, not only for {only}"
    return None


def _row_counts(graph: Graph) -> Iterator[int | torch.SymInt]:
    """Rows of q of each attention, of those in called submodules too."""
    for node in graph.nodes:
        if node.target in (*ATTENTION, *QUANTIZED):
            yield value_of(node.args[0]).shape[0]
        elif node.op == "call_module" and graph.owning_module is not None:
            module = graph.owning_module.get_submodule(str(node.target))
            if isinstance(module, GraphModule):
                yield from _row_counts(module.graph)


def _bounds(size: int | torch.SymInt) -> tuple[int, int]:
    if not isinstance(size, torch.SymInt):
        return size, size
    bounds = size.node.shape_env.bound_sympy(expression(size))
    ends = zip((bounds.lower, bounds.upper), (0, NO_LIMIT), strict=True)
    least, most = (int(end) if end.is_Integer else other for end, other in ends)
    return least, most


def _in_words(least: int, most: int) -> str:
    if most == NO_LIMIT:
        return f"{least} or more"
    return f"{least}" if least == most else f"{least} to {most}"
