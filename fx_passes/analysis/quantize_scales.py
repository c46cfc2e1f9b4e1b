"""The scales of a quantization, read from the graph: given, or from the largest |x| (amax).

T tokens, G groups of a token.
"""

import dataclasses
import math
import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from attn_ops.output_quant.schemes import FP8_MAX
from fx_passes.analysis.graph_ops import aten, operator_name
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.steps import (
    NotAFormError,
    converted,
    dtype_of,
    limited,
    num_elements,
    number_of,
    reshaped,
    rounded,
    widened,
)
from fx_passes.analysis.values import value_of

_POWER_STEPS: dict[Any, str] = {
    aten.log2.default: "log2", aten.ceil.default: "ceil", aten.exp2.default: "exp2",
}  # fmt: skip
"""2 ** ceil(log2(scale)), one after the other; also `pow` of the base 2."""

_INVERSE_MAX = rounded(1 / FP8_MAX, torch.float32)


@dataclasses.dataclass(frozen=True)
class ComputedScale:
    """A scale that comes from what it scales.

    Attributes:
        maxima: the node that takes the largest elements.
        source: of what; `is_absolute`: the maxima are those of |source|.
        share: how many neighbours, in row-major order, share a scale.
        holders: nodes that hold the scales [T, G] in row-major order, in any shape.
        inner: nodes that lead to them.
        options: of `OutputQuant`; `min_scale` is the least scale.
        dtype: to which the scale was rounded last.
    """

    maxima: Node
    source: Node
    is_absolute: bool
    share: sympy.Expr
    holders: list[Node]
    inner: set[Node]
    options: dict[str, Any]
    dtype: torch.dtype


def given_scale(operand: Node, device: torch.device) -> Node:
    """The scale of one element that is spread over all values, which are on `device`.

    Raises:
        NotAFormError: it has several elements, numbers that float32 does not have, or is elsewhere,
            as a tensor of no dimension may be.
    """
    node = operand
    while num_elements(node) != 1:
        source = node.args[0] if node.target is aten.expand.default else reshaped(node)
        if not isinstance(source, Node):
            raise NotAFormError("its scale has several elements and is not computed from it")
        node = source
    if dtype_of(node) not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotAFormError(f"its scale is {dtype_of(node)}, which float32 does not hold")
    if value_of(node).device != device:
        raise NotAFormError(f"its scale is on {value_of(node).device}, and x on {device}")
    return node


def computed_scale(
    operand: Node, division: Node, multiplies: bool, own: torch.dtype
) -> ComputedScale:
    """The scale that x is divided by, if it is an amax of x.

    Args:
        operand: what stands in the division, or in the product.
        multiplies: whether x is multiplied.
        own: x's dtype as attention wrote it.

    Raises:
        NotAFormError: it is computed in another way than `attention_quant` computes it.
    """
    top, repeats, holders, inverted = _without_spreading(operand)
    repeats *= _repeats(value_of(operand), value_of(division))
    steps, maxima, way = _down_to_amax(top)
    source, is_absolute, dims = _reduction(maxima)
    numbers = _Numbers(own, dtype_of(maxima), value_of(maxima).device)
    for kind, number in steps:
        getattr(numbers, kind)(number)
    numbers.finish(inverted, multiplies)
    share = _neighbours(value_of(source), dims)
    if share != repeats:
        raise NotAFormError(f"{share} values have one amax, but {repeats} are divided by one scale")
    return ComputedScale(
        maxima, source, is_absolute, share, holders, {*way, maxima} - set(holders),
        numbers.options(), own if numbers.round_scale else torch.float32,
    )  # fmt: skip


# -- shapes ----------------------------------------------------------------------------------------


def _without_spreading(
    operand: Node,
) -> tuple[Node, sympy.Expr, list[Node], torch.dtype | None]:
    """The scale before it is spread over its values: the node that made it, how many neighbours it
    was repeated for, the nodes that hold it, and the dtype of 1 / scale, if that was spread.
    """
    inverted: torch.dtype | None = None
    node, repeats, holders = operand, expression(1), []
    while True:
        holders.append(node)
        if (source := _unchanged(node)) is not None:
            node = source
        elif node.target is aten.expand.default:
            node, spread = _first(node), node
            repeats *= _repeats(value_of(node), value_of(spread))
            holders = []
        elif node.target is aten.reciprocal.default and inverted is None:
            node, inverted, holders = _first(node), dtype_of(node), []
        else:
            return node, repeats, holders, inverted


def _repeats(scale: torch.Tensor, values: torch.Tensor) -> sympy.Expr:
    """How many neighbours of `values` have one element of `scale`, which is broadcast to them.

    Raises:
        NotAFormError: they are no neighbours.
    """
    wide = [expression(size) for size in values.shape]
    narrow = [expression(size) for size in scale.shape]
    narrow = [expression(1)] * (len(wide) - len(narrow)) + narrow
    repeats = expression(1)
    for size, wanted in zip(narrow, wide, strict=True):
        if size == wanted and (size == 1 or repeats == 1):
            continue
        if size != 1:
            raise NotAFormError("values that share a scale are no neighbours")
        repeats *= wanted
    return repeats


def _neighbours(x: torch.Tensor, dims: list[int]) -> sympy.Expr:
    """How many neighbours of x have one amax, over `dims`; [] are all.

    Raises:
        NotAFormError: they are no neighbours.
    """
    sizes = [expression(size) for size in x.shape]
    reduced = {dim % len(sizes) for dim in dims} or set(range(len(sizes)))
    kept = [d for d, size in enumerate(sizes) if d not in reduced and size != 1]
    taken = [d for d in reduced if sizes[d] != 1]
    if kept and taken and max(kept) > min(taken):
        raise NotAFormError("values that share a scale are no neighbours")
    return math.prod((sizes[d] for d in taken), start=expression(1))


# -- numbers ---------------------------------------------------------------------------------------


def _first(node: Node) -> Node:
    assert isinstance(node.args[0], Node)
    return node.args[0]


def _unchanged(node: Node) -> Node | None:
    """The node that holds the same scales: reshaped, widened, |scale|, scale * 1."""
    if node.target is aten.abs.default:
        return _first(node)
    if node.target is aten.mul.Tensor and number_of(node.args[1]) == 1:
        return _first(node)
    return widened(node) or reshaped(node)


def _down_to_amax(top: Node) -> tuple[list[tuple[str, Any]], Node, list[Node]]:
    """What is done to the amax, in order; the amax; and the nodes on the way."""
    steps, way, node = [], [], top
    while not _is_amax(node):
        way.append(node)
        source = _unchanged(node)
        if source is not None:
            steps.append(("to", dtype_of(node)))
        else:
            source, step = _step(node)
            steps.append(step)
            if dtype_of(node) != dtype_of(source):  # by a number of one element, in a wider dtype
                steps.append(("to", dtype_of(node)))
        node = source
    return steps[::-1], node, way


def _step(node: Node) -> tuple[Node, tuple[str, Any]]:
    """The node before, and what is done to it."""
    if (source := converted(node)) is not None:
        return source, ("to", dtype_of(node))
    if (kept := limited(node)) is not None and kept.high is None:
        return kept.source, ("floor", kept.low)
    if node.target is aten.div.Tensor and (number := number_of(node.args[1])) is not None:
        return _first(node), ("divide", number)
    if node.target is aten.mul.Tensor and isinstance(node.args[1], float):
        return _first(node), ("multiply", node.args[1])
    if node.target in _POWER_STEPS:
        return _first(node), ("power", _POWER_STEPS[node.target])
    if node.target is aten.pow.Scalar and node.args[0] == 2 and isinstance(node.args[1], Node):
        return node.args[1], ("power", "exp2")
    raise NotAFormError(f"its scale is computed with {operator_name(node)}, which no form has")


def _is_amax(node: Node) -> bool:
    if node.target is operator.getitem:
        return node.args[1:] == (0,) and _first(node).target is aten.max.dim
    return node.target in (aten.amax.default, aten.max.default, aten.linalg_vector_norm.default)


def _reduction(maxima: Node) -> tuple[Node, bool, list[int]]:
    """What an amax is taken of, whether of absolute values, and over which dimensions; []: all."""
    node = _first(maxima) if maxima.target is operator.getitem else maxima
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False))  # type: ignore
    given |= node.kwargs
    dims: Any = given.get("dim") if given.get("dim") is not None else []
    is_norm = node.target is aten.linalg_vector_norm.default
    if is_norm and (given.get("ord", 2) != math.inf or given.get("dtype") is not None):
        raise NotAFormError("its scale comes from another norm than the largest |x|")
    return _first(node), is_norm, list(dims) if isinstance(dims, list | tuple) else [dims]


class _Numbers:
    """Follows an amax through what is done to it, and notes it as options of `OutputQuant`.

    Every step keeps the order of numbers. So floors on the way are one floor of the scale: `least`,
    which is what they make of an amax of zero.

    Args:
        own: x's dtype, in which a scale may be rounded.
        dtype: the amax's.
        device: a GPU multiplies by 1 / 448 where it divides by 448.
    """

    def __init__(self, own: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        self.own, self.dtype, self.is_cpu = own, dtype, device.type == "cpu"
        self.is_divided = self.round_scale = self.inverse_scale = False
        self.least = 0.0
        self.powers: list[str] = []

    def to(self, dtype: torch.dtype) -> None:
        """A conversion."""
        if dtype == self.dtype:
            return
        if dtype not in (torch.float32, self.own):
            raise NotAFormError(f"its scale is converted to {dtype} on the way")
        if self.powers:
            raise NotAFormError(f"its scale is rounded to {dtype} after another rounding")
        self.dtype, self.least = dtype, rounded(self.least, dtype)
        self.round_scale |= self.is_divided and dtype != torch.float32

    def floor(self, least: float) -> None:
        """The larger of it and a number."""
        if not math.isfinite(least) or self.powers:
            raise NotAFormError("its scale is kept above what no form has")
        self.least = max(self.least, rounded(least, self.dtype))

    def divide(self, number: float) -> None:
        if self.is_divided or number != FP8_MAX:
            raise NotAFormError(f"its amax is divided by {number}, not by {FP8_MAX}")
        self.is_divided = True
        self.round_scale = self.dtype != torch.float32
        least = self.least / FP8_MAX if self.is_cpu else self.least * _INVERSE_MAX
        self.least = rounded(rounded(least, torch.float32), self.dtype)

    def multiply(self, number: float) -> None:
        if rounded(number, torch.float32) != _INVERSE_MAX:
            raise NotAFormError(f"its amax is multiplied by {number}, not by 1 / {FP8_MAX}")
        if self.is_cpu:
            raise NotAFormError("amax * (1 / 448) rounds otherwise than amax / 448 on a CPU")
        self.divide(FP8_MAX)

    def power(self, step: str) -> None:
        """A step of rounding up to a power of two."""
        self.powers.append(step)
        exact = self.own != torch.float32 and self.dtype == torch.float32
        if self.powers != ["log2", "ceil", "exp2"][: len(self.powers)] or not self.is_divided:
            raise NotAFormError("its scale is rounded to a power of two in another way than up")
        if not exact:  # of 24 bits, log2 may round to a whole number what is none
            raise NotAFormError(f"log2 of a scale from {self.own} rounds, in {self.dtype}")

    def finish(self, inverted: torch.dtype | None, multiplies: bool) -> None:
        """Check the whole.

        Args:
            inverted: in which dtype 1 / scale was computed, if it was.
            multiplies: whether x is multiplied.

        Raises:
            NotAFormError: it is no amax / 448, or what is done with it rounds otherwise.
        """
        if not self.is_divided or len(self.powers) not in (0, 3):
            raise NotAFormError("its scale is no amax / 448")
        if self.powers and not _same_power(self.least):
            raise NotAFormError("scales that are powers of two have no least number, or an odd one")
        if (inverted is not None) != multiplies:
            raise NotAFormError("it is multiplied by its scale")
        if inverted not in (None, torch.float32) and not self.powers:
            raise NotAFormError(f"it is multiplied by 1 / scale, which is rounded to {inverted}")
        self.inverse_scale = multiplies and not self.powers  # of a power of two it is exact

    def options(self) -> dict[str, Any]:
        return {
            "min_scale": self.least,
            "round_scale": self.round_scale,
            "multiply": self.inverse_scale,
            "ue8m0": bool(self.powers),
        }


def _same_power(least: float) -> bool:
    """Whether a least scale has an inverse, and log2 tells its power of two."""
    if least < torch.finfo(torch.float32).tiny:
        return False
    mantissa, exponent = math.frexp(least)
    wanted = math.ldexp(1.0, exponent - (mantissa == 0.5))
    return float(torch.tensor(least).log2().ceil().exp2()) == wanted
