"""What single nodes of an ATen graph do to numbers: reshape, convert, limit, or hold one number."""

import dataclasses
import math
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import value_of

_KEEP_ORDER = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default,
}  # fmt: skip
"""Operators whose result holds their argument's elements in the same row-major order."""

_CONVERT = {
    torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype,
}  # fmt: skip

_EXACT = {
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
}  # fmt: skip
"""Conversions that round nothing."""

_LIMITS: dict[Any, tuple[str, ...]] = {
    aten.clamp_min.default: ("low",), aten.clamp_min.Tensor: ("low",),
    aten.maximum.default: ("low",), aten.minimum.default: ("high",),
    aten.clamp_max.default: ("high",), aten.clamp_max.Tensor: ("high",),
    aten.clamp.default: ("low", "high"), aten.clamp.Tensor: ("low", "high"),
}  # fmt: skip
"""Operators that limit their first argument, and to what their further ones do; NaN stays NaN."""


class NotAFormError(Exception):
    """Why a graph does not quantize in a form that is known."""


@dataclasses.dataclass(frozen=True)
class Limited:
    """A value that is kept within numbers.

    Attributes:
        low, high: the least and the largest; None where there is none, NaN where it is not known.
    """

    source: Node
    low: float | None = None
    high: float | None = None

    @property
    def is_unknown(self) -> bool:
        return any(limit is not None and math.isnan(limit) for limit in (self.low, self.high))


def dtype_of(node: Node) -> torch.dtype:
    return value_of(node).dtype


def num_elements(node: Node) -> Any:
    """As a formula of symbols."""
    return math.prod((expression(size) for size in value_of(node).shape), start=expression(1))


def reshaped(node: Node) -> Node | None:
    """What `node` holds in another shape: the same elements in the same order; None if it is not.

    A permutation that moves only sizes of 1 keeps the order.
    """
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is None or not isinstance(value_of(source), torch.Tensor):
        return None
    if node.target in _KEEP_ORDER:
        return source
    if node.target is aten.expand.default:
        return source if num_elements(source) == num_elements(node) else None
    if node.target in (aten.permute.default, aten.transpose.int, aten.t.default):
        moved = [_sizes(value_of(one)) for one in (source, node)]
        return source if moved[0] == moved[1] else None
    return None


def _sizes(value: torch.Tensor) -> list[tuple[Any, Any]]:
    """Sizes besides 1, with their strides, by which dimensions are told apart."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return [(expression(n), expression(s)) for n, s in pairs if expression(n) != 1]


def converted(node: Node) -> Node | None:
    """What `node` holds in another dtype, on the same device."""
    if node.target not in _CONVERT or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    return source if value_of(source).device == value_of(node).device else None


def widened(node: Node) -> Node | None:
    """What `node` holds in a dtype that has every number of the first."""
    source = converted(node)
    if source is None:
        return None
    pair = (dtype_of(source), dtype_of(node))
    return source if pair in _EXACT or pair[0] == pair[1] else None


def limited(node: Node) -> Limited | None:
    """What `node` keeps within limits."""
    names = _LIMITS.get(node.target)
    if names is None:
        return None
    source, *given = node.args
    given += [node.kwargs.get(name) for name in ("min", "max")[len(given) : len(names)]]
    if (
        node.target in (aten.maximum.default, aten.minimum.default)
        and number_of(source) is not None
    ):
        source, given = given[0], [source]
    if not isinstance(source, Node):
        return None
    limits = {
        name: None if limit is None else _known(limit)
        for name, limit in zip(names, given, strict=False)
    }
    return Limited(source, **limits)


def _known(limit: Any) -> float:
    number = number_of(limit)
    return math.nan if number is None else number


def number_of(value: Any) -> float | None:
    """The one number that an argument holds, None if it is not known when the graph is compiled."""
    if isinstance(value, bool) or not isinstance(value, int | float | Node):
        return None
    if not isinstance(value, Node):
        return float(value)
    if value.target is aten.full.default or value.target is aten.scalar_tensor.default:
        number = number_of(value.args[-1])
        return number if number is None else rounded(number, dtype_of(value))
    if value.op == "get_attr":
        return _constant(value)
    source = reshaped(value)
    if source is not None:
        return number_of(source)
    source = converted(value)
    number = None if source is None else number_of(source)
    return number if number is None else rounded(number, dtype_of(value))


def _constant(node: Node) -> float | None:
    """Of a constant that tracing put into the graph."""
    owner: Any = node.graph.owning_module
    value = getattr(owner, cast(str, node.target), None)
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor | torch.nn.Parameter):
        return None
    return float(value) if value.numel() == 1 and value.device.type == "cpu" else None


def rounded(number: float, dtype: torch.dtype) -> float:
    """`number` as `dtype` holds it."""
    return float(torch.tensor(number, dtype=dtype))
