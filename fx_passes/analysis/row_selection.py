"""Where a model takes the rows whose logits are wanted out of a value: `h[:, logits_to_keep]`.

T rows of the batch, R logits rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Node

from fx_passes.analysis.fake_run import FakeRun, NotApplicableError
from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import expression, mentions, row_dim


class OneRowError(NotApplicableError):
    """The graph was compiled for a batch of one row, which is no prefill."""


@dataclasses.dataclass
class Selection:
    """Where the model takes logits rows out of a value: `node = source[..., indices, ...]`."""

    node: Node
    source: Node
    indices: Node  # [R] int64
    dim: int  # of the source


def find_selections(values: FakeRun) -> list[Selection]:
    """Nodes that do nothing but take rows out of a value by one index tensor, an input."""
    found, sizes = [], []
    for node in values.calls:
        selection = _selection(node, values)
        if selection is not None:
            found.append(selection)
            sizes.append(values.of[selection.source].shape[selection.dim])
    dynamic = [s for s, size in zip(found, sizes, strict=True) if isinstance(size, torch.SymInt)]
    if found and not dynamic:
        if max(sizes) == 1:
            raise OneRowError("it was compiled for a batch of one row")
        raise NotApplicableError(f"its number of rows is a constant, {sizes[-1]}; mark it dynamic")
    if not dynamic:
        raise NotApplicableError(
            "no rows are selected by a tensor of indices; pass logits_to_keep or logits_indices as "
            "a tensor (a slice by an int is not recognized), and compile without graph breaks"
        )
    if len({s.indices for s in dynamic}) > 1:
        names = ", ".join(dict.fromkeys(s.indices.name for s in dynamic))
        raise NotApplicableError(f"rows are selected by several tensors: {names}")
    return dynamic


def _selection(node: Node, values: FakeRun) -> Selection | None:
    """`node` as `source[..., indices, ...]` and nothing else, if it is that."""
    tensors = [a for a in node.all_input_nodes if isinstance(values.of[a], torch.Tensor)]
    inputs = [a for a in tensors if a.op == "placeholder" and values.of[a].dim() == 1]
    found = [picked for call in values.calls[node] if (picked := _picked(call)) is not None]
    if not (len(tensors) == 2 and len(inputs) == 1 and len(found) == 1):
        return None
    source = next(a for a in tensors if a is not inputs[0])
    (x, dim), out = found[0], values.of[node]
    if source.op == "placeholder" or not isinstance(out, torch.Tensor):
        return None  # a table
    shapes = [[expression(size) for size in one.shape] for one in (values.of[source], x, out)]
    picked = [*shapes[0][:dim], expression(values.of[inputs[0]].shape[0]), *shapes[0][dim + 1 :]]
    if shapes[1] != shapes[0] or shapes[2] != picked:
        return None
    return Selection(node, source, inputs[0], dim)


def _picked(call: tuple[Any, tuple, dict, Any]) -> tuple[torch.Tensor, int] | None:
    """x and the dimension that an ATen call `x[..., indices, ...]` picks from; else None."""
    op, args = call[0], call[1]
    if op is aten.index_select.default:
        return args[0], int(args[1]) % args[0].dim()
    if op is not aten.index.Tensor:
        return None
    places = [d for d, index in enumerate(args[1]) if index is not None]
    if len(places) != 1 or args[1][places[0]].dim() != 1:
        return None
    if args[1][places[0]].dtype not in (torch.int32, torch.int64):  # a mask
        return None
    return args[0], places[0]


def row_symbol(selections: Sequence[Selection], values: FakeRun) -> sympy.Symbol:
    """T, in whose dimension all selections pick."""
    last = selections[-1]
    symbol = cast(sympy.Symbol, expression(values.of[last.source].shape[last.dim]))
    for selection in selections:
        source = values.of[selection.source]
        try:
            picks_rows = row_dim(source, symbol) == selection.dim
            picks_rows &= not mentions(values.of[selection.indices], symbol)  # R is not T
        except ValueError:
            picks_rows = False
        if not (picks_rows and isinstance(symbol, sympy.Symbol)):
            raise NotApplicableError(
                f"rows of {selection.source.name} cannot be told apart, of shape "
                f"{list(source.shape)}"
            )
    return symbol
