"""Sizes as arguments of a graph's nodes, without a guard."""

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import expression, input_of_size, multiple
from fx_passes.analysis.values import value_of


class RowCount:
    """Graph arguments for sizes: numbers as they are, multiples of the row count as nodes.

    The row count is the root's first symbolic size.
    """

    def __init__(self, graph: Graph, root: Node) -> None:
        self.graph, self.root, self.node = graph, root, None
        self.made: list[Node] = []
        shape = value_of(root).shape
        self.dim = next((d for d, size in enumerate(shape) if isinstance(size, torch.SymInt)), 0)
        self.rows = shape[self.dim]

    def argument(self, size: int | torch.SymInt) -> int | Node | None:
        """The argument; None: the size is neither a number nor a multiple."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        if not isinstance(self.rows, torch.SymInt):
            return None
        factor = multiple(expression(size), expression(self.rows))
        if factor is None:
            return None
        if self.node is None:
            self.node = input_of_size(self.graph, expression(self.rows)) or self._make(
                aten.sym_size.int, (self.root, self.dim), self.rows
            )
        if factor == 1:
            return self.node
        return self._make(operator.mul, (self.node, factor), size)

    def _make(self, target: Callable, args: tuple, value: torch.SymInt) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        self.made.append(node)
        return node

    def forget(self) -> None:
        """Take back the nodes that nothing reads."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)
