"""The gate of an expert in a graph: which activation, with which limits, of which columns.

S rows, F columns of a gate.
"""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import equal, is_contiguous
from fx_passes.analysis.steps import limited, number_of
from fx_passes.analysis.values import value_of
from fx_passes.passes.rms_norms import factors, unconverted


class Gate(NamedTuple):
    """What `attn_ops::experts` is told of a gate."""

    activation: str
    alpha: float
    limit: float | None
    interleaved: bool
    source: Node  # gate and up in one, [S, 2 * F]

    def keywords(self) -> dict[str, Any]:
        """Those that are no defaults."""
        given = {"activation": self.activation, "alpha": self.alpha, "limit": self.limit}
        given["interleaved"] = self.interleaved
        defaults = {"activation": "silu", "alpha": 1.0, "limit": None, "interleaved": False}
        return {name: value for name, value in given.items() if value != defaults[name]}


def gate_of(node: Node) -> Gate | None:
    """The gate that ends in a product of the activated half of some columns and the other half."""
    dtype = value_of(node).dtype
    for activated, other in factors(_plain(node, dtype)):
        for kind, alpha, x in _activations(_plain(activated, dtype), dtype):
            up, plus_one = _less_one(_plain(other, dtype), dtype)
            if plus_one and kind != "silu":
                continue
            gate, bounds = _limits(x, dtype)
            up, bounds_of_up = _limits(up, dtype)
            limit = bounds[1]
            symmetric = (None, None) if limit is None else (-limit, limit)
            if bounds[0] is not None or bounds_of_up != symmetric:
                continue
            source, interleaved = _whole_of(gate, up)
            if source is not None:
                name = "gpt_oss" if plus_one else kind
                return Gate(name, alpha, limit, interleaved, source)
    return None


def _plain(node: Any, dtype: torch.dtype) -> Any:
    """What is behind conversions that keep values of `dtype`."""
    while (source := unconverted(node, dtype)) is not node:
        node = source
    return node


def _activations(node: Any, dtype: torch.dtype) -> Iterator[tuple[str, float, Any]]:
    """(activation, alpha, what is activated) that a node may be."""
    if not isinstance(node, Node):
        return
    if node.target is aten.silu.default:
        yield "silu", 1.0, _plain(node.args[0], dtype)
    if node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        yield "gelu_tanh", 1.0, _plain(node.args[0], dtype)
    if node.target is aten.div.Tensor:
        x, below = cast(tuple[Any, Any], node.args)
        minus = _called(aten.exp.default, _sum_with(1, below))
        if _plain(_called(aten.neg.default, minus), dtype) is _plain(x, dtype) is not None:
            yield "silu", 1.0, _plain(x, dtype)
    for x, factor in factors(node):
        x, factor = _plain(x, dtype), _plain(factor, dtype)
        scaled = _plain(_called(aten.sigmoid.default, factor), dtype)
        if scaled is x:
            yield "silu", 1.0, x
        number, source = _times_number(scaled)
        if number is not None and _plain(source, dtype) is x:
            yield "silu", number, x
        half, source = _times_number(x)
        if half == 0.5 and _is_gelu_factor(factor, _plain(source, dtype), dtype):
            yield "gelu_tanh", 1.0, _plain(source, dtype)


def _is_gelu_factor(node: Any, x: Any, dtype: torch.dtype) -> bool:
    """Whether a node is 1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x))."""
    beta, inner = _times_number(_called(aten.tanh.default, _sum_with(1, node)))
    if beta is None or abs(beta - 0.7978845608028654) > 1e-6:
        return False
    if not isinstance(inner, Node) or inner.target is not aten.add.Tensor or inner.kwargs:
        return False
    for first, cubic in (inner.args, inner.args[::-1]):
        kappa, cube = _times_number(cubic)
        if kappa is None or abs(kappa - 0.044715) > 1e-9 or _plain(first, dtype) is not x:
            continue
        for square, factor in factors(cube):
            pairs = [tuple(_plain(one, dtype) for one in pair) for pair in factors(square)]
            if _plain(factor, dtype) is x and (x, x) in pairs:
                return True
    return False


def _called(target: Any, node: Any) -> Any:
    """The argument of a call of one operator; None: it is no such call."""
    return node.args[0] if isinstance(node, Node) and node.target is target else None


def _sum_with(number: float, node: Any) -> Any:
    """What a node adds a number to, in either order; None: nothing."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return None
    first, second = node.args
    if number_of(second) == number:
        return first
    return second if number_of(first) == number else None


def _times_number(node: Any) -> tuple[float | None, Any]:
    """A number, and what a node multiplies by it."""
    if not isinstance(node, Node) or node.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return None, None
    first, second = node.args
    for number, source in ((number_of(second), first), (number_of(first), second)):
        if number is not None:
            return number, source
    return None, None


def _less_one(node: Any, dtype: torch.dtype) -> tuple[Any, bool]:
    """x of x + 1, and whether 1 is added at all."""
    source = _sum_with(1, node)
    return (node, False) if source is None else (_plain(source, dtype), True)


def _limits(node: Any, dtype: torch.dtype) -> tuple[Any, tuple[float | None, float | None]]:
    """What is behind limits, and the least and largest values that they let through."""
    low, high = None, None
    while isinstance(node, Node) and (found := limited(node)) is not None:
        low = found.low if low is None else low if found.low is None else max(low, found.low)
        high = found.high if high is None else high if found.high is None else min(high, found.high)
        node = _plain(found.source, dtype)
    return node, (low, high)


def _whole_of(gate: Any, up: Any) -> tuple[Node | None, bool]:
    """The columns that gate and up are the halves of, and whether these take turns."""
    source = _source_of_half(gate)
    if source is None or _source_of_half(up) is not source:
        return None, False
    whole, halves = value_of(source), (value_of(gate), value_of(up))
    width = whole.shape[-1]
    if whole.dim() != 2 or not is_contiguous(whole) or not isinstance(width, int) or width % 2:
        return None, False
    places = [half.storage_offset() - whole.storage_offset() for half in halves]
    for interleaved, step, second in ((False, 1, width // 2), (True, 2, 1)):
        fits = [
            equal(tuple(half.shape), (whole.shape[0], width // 2))
            and equal(tuple(half.stride()), (width, step))
            for half in halves
        ]
        if all(fits) and equal(tuple(places), (0, second)):
            return source, interleaved
    return None, False


def _source_of_half(node: Any) -> Node | None:
    if not isinstance(node, Node):
        return None
    if node.target is operator.getitem and cast(Node, node.args[0]).target is aten.split.Tensor:
        return same_of(cast(Node, cast(Node, node.args[0]).args[0]))
    if node.target in (aten.slice.Tensor, aten.as_strided.default):
        return same_of(cast(Node, node.args[0]))
    return None


def same_of(node: Node) -> Node:
    """x of x.unsqueeze(d).squeeze(d), which an addition in place to a view leaves."""
    while node.target is aten.squeeze.dim:
        wider = cast(Node, node.args[0])
        if wider.target is not aten.unsqueeze.default:
            break
        if len({cast(int, one.args[1]) % value_of(wider).dim() for one in (node, wider)}) > 1:
            break
        node = cast(Node, wider.args[0])
    return node
