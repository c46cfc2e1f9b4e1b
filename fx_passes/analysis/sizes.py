"""What size a dimension has, and whether it is the number of tokens. No question adds a guard.

T rows of the batch. "The row dimension" of a value is its one dimension of size T.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from fx_passes.analysis.values import value_of


def expression(size: Any) -> sympy.Expr:
    """A size as a formula of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def hint(size: int | torch.SymInt) -> int | None:
    """The size in the call that was traced; None where it was not known."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def multiple(size: sympy.Expr, of: sympy.Expr) -> int | None:
    """n, if `size` is n times `of`; else None."""
    factor = size / of
    return int(factor) if factor.is_Integer else None


def equal(a: tuple, b: tuple) -> bool:
    """Whether two shapes or strides are the same formulas."""
    return [expression(size) for size in a] == [expression(size) for size in b]


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether the formulas of its strides say so, for any number of rows."""
    wanted = sympy.Integer(1)
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if expression(size) != 1 and expression(stride) != wanted:
            return False
        wanted *= expression(size)
    return True


def mentions(x: torch.Tensor, symbol: sympy.Symbol) -> bool:
    """Whether a size of x depends on T."""
    return any(symbol in expression(size).free_symbols for size in x.shape)


def row_dim(x: torch.Tensor, symbol: sympy.Symbol) -> int | None:
    """The one dimension of size T; None: x has no rows.

    Raises:
        ValueError: rows are not told apart in x: two dimensions are T, or one is made of T and
            something else.
    """
    found = [d for d, size in enumerate(x.shape) if symbol in expression(size).free_symbols]
    if not found:
        return None
    if len(found) > 1 or expression(x.shape[found[0]]) != symbol:
        raise ValueError(f"its token dimension is ambiguous, of shape {list(x.shape)}")
    return found[0]


def input_of_size(graph: Graph, size: sympy.Expr) -> Node | None:
    """The input of the graph that is this size."""
    for node in graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, torch.SymInt) and expression(value) == size:
            return node
    return None


def unbound_sizes(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Inputs of the graph that are sizes which shapes of `nodes` are made of, and none is."""
    values = [value_of(node) for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [expression(size) for x in tensors for size in (*x.shape, *x.stride())]
    sizes += [expression(value) for value in values if isinstance(value, torch.SymInt)]
    free = set().union(*(size.free_symbols for size in sizes)) - set(sizes)
    found = (input_of_size(graph, symbol) for symbol in sorted(free, key=str))  # pyright: ignore
    return [node for node in found if node is not None and node not in nodes]
