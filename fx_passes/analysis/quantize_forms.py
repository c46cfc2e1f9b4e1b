"""Quantization to FP8 behind attention, recognised by what a graph computes.

Libraries write the same numbers in other nodes. A site is read from its FP8 result backwards: how x
is divided by a scale, limited and rounded, and how the scale comes from the largest |x| of those
that share it. `FORMS` lists what is known.

T tokens, N query heads, H head size, W = N * H values of a row.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch.fx import Node

from attn_ops.output_quant.schemes import FP4_BLOCK, FP8_MAX, OutputQuant
from fx_passes.analysis.graph_ops import (
    QUANTIZED_FORM,
    WITH_LSE,
    aten,
    computed_from,
    operator_name,
)
from fx_passes.analysis.quantize_scales import ComputedScale, computed_scale, given_scale
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.steps import (
    NotAFormError,
    converted,
    dtype_of,
    limited,
    num_elements,
    reshaped,
    widened,
)
from fx_passes.analysis.values import value_of


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to quantize that `attention_quant` computes.

    Attributes:
        name: as reports call it.
        scheme: of `attn_ops.output_quant.schemes.SCHEMES`.
        share: which values share a scale: all of a token, all of the batch, so many neighbours of a
            token; "given": the scale is not computed from them.
        libraries: which write it.
    """

    name: str
    scheme: str
    share: Literal["given", "row", "batch"] | int
    libraries: str


FORMS = (
    Form("a given scale", "fp8_static", "given", "compressed-tensors, ModelOpt, by hand"),
    Form("a scale a token", "fp8_row", "row", "torchao PerRow"),
    Form("a scale for the batch", "fp8_tensor", "batch", "torchao PerTensor"),
    Form("a scale for 128 values", "fp8_group128", 128, "torchao PerBlock, DeepSeek's act_quant"),
    Form("a scale for 64 values", "fp8_group64", 64, "the same, of narrower groups"),
)

ODD_SHAPE = "a shape is neither a number nor a multiple of the row count"

_DIVISIONS = (aten.div.Tensor, aten.mul.Tensor)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Attention whose output is quantized.

    Attributes:
        values: the node that converts to FP8.
        given: the given scale.
        scales: nodes that hold the computed scale, in any shape.
        inner: what leads from attention to `values` and `scales`.
    """

    form: Form
    how: OutputQuant
    attention: Node
    values: Node
    given: Node | None
    scales: list[Node]
    inner: set[Node]

    def other_reader(self) -> Node | None:
        """Who needs the unquantized output, or a value on the way; None: nobody."""
        known = {*self.inner, *self.scales, self.values, *self.sizes()}
        return next((user for user in self._users() if user not in known), None)

    def sizes(self) -> list[Node]:
        """Nodes that only ask for a size of the unquantized output, or of a value on the way."""
        return [user for user in self._users() if user.target is aten.sym_size.int]

    def _users(self) -> Iterator[Node]:
        return (user for node in (self.attention, *self.inner) for user in node.users)


def recognise(values: Node, behind: Node) -> Quantized:
    """What the conversion `values` ends, which depends on the attention `behind`.

    Raises:
        NotAFormError: it is none of `FORMS`.
    """
    is_plain = behind.target in QUANTIZED_FORM
    out = behind if is_plain else cast(Node, behind.args[0])  # with its log-sum-exp: q is as large
    if num_elements(values) * FP4_BLOCK == num_elements(out):
        raise NotAFormError("scales of 16 values are NVFP4's, whose packed bytes no form has")
    division = _Division.behind(values)
    source, operand = division.operands()
    attention, way = way_to_attention(source)
    division.check(attention, operand)
    inner = {*division.nodes, *way}
    options: dict[str, Any] = {"round_values": division.rounds(attention)}
    if attention not in computed_from(operand):
        given, scale, share = given_scale(operand, value_of(division.node).device), None, "given"
        options |= {"multiply": division.multiplies}
    else:
        own = dtype_of(attention)
        given, scale = None, computed_scale(operand, division.node, division.multiplies, own)
        inner |= {*scale.inner, *_way_of_amax(scale, attention)}
        share, options = _share(scale, attention), options | scale.options
    division.check_limits(scale)
    scales = [] if scale is None else scale.holders
    form, how = _form(share, options)
    return Quantized(form, how, attention, values, given, scales, inner - set(scales))


def way_to_attention(node: Node, *, absolute: bool = False) -> tuple[Node, list[Node]]:
    """The attention whose output `node` holds in another shape or a wider dtype, and the nodes
    between, `node` included.

    Args:
        absolute: the absolute values are held.

    Raises:
        NotAFormError: something else is computed between.
    """
    way: list[Node] = []
    while node.target not in QUANTIZED_FORM:
        way.append(node)
        source = reshaped(node) or widened(node)
        if source is None and absolute and node.target is aten.abs.default:
            source, absolute = cast(Node, node.args[0]), False
        if source is None:
            raise NotAFormError(_why_between(node))
        node = source
    if absolute:
        raise NotAFormError("its amax is not that of absolute values")
    return node, way


def _why_between(node: Node) -> str:
    if node.target in (aten.slice.Tensor, aten.as_strided.default):
        return "a part of its columns is quantized, as with v_head_size"
    others = [one for one in (node, *node.all_input_nodes) if one.target in WITH_LSE]
    if others:
        return f"{operator_name(others[0])} has no quantized form"
    if (source := converted(node)) is not None:
        return f"it is converted from {dtype_of(source)} to {dtype_of(node)} before"
    return f"{operator_name(node)} stands between attention and its quantization"


@dataclasses.dataclass
class _Division:
    """x / scale or x * scale, and what is done up to FP8.

    Attributes:
        nodes: from the division on, FP8 not included.
        low, high: the limits.
    """

    node: Node
    nodes: list[Node]
    low: float
    high: float

    @classmethod
    def behind(cls, values: Node) -> "_Division":
        """Of the conversion to FP8."""
        if dtype_of(values) != torch.float8_e4m3fn:
            raise NotAFormError(f"{dtype_of(values)} is no scheme; supported: float8_e4m3fn")
        nodes, low, high = [cast(Node, values.args[0])], -math.inf, math.inf
        while (node := nodes[-1]).target not in _DIVISIONS:
            kept = limited(node)
            if kept is not None:
                if kept.is_unknown:
                    raise NotAFormError("values are limited to what no number of the graph is")
                low = low if kept.low is None else max(kept.low, low)
                high = high if kept.high is None else min(kept.high, high)
            source = reshaped(node) or converted(node) if kept is None else kept.source
            if source is None:
                raise NotAFormError(f"{operator_name(node)} stands where it is divided by a scale")
            nodes.append(source)
        return cls(node, nodes, low, high)

    @property
    def multiplies(self) -> bool:
        return self.node.target is aten.mul.Tensor

    def operands(self) -> tuple[Node, Node]:
        """x and the scale."""
        x, scale = self.node.args
        if not (isinstance(x, Node) and isinstance(scale, Node)):
            raise NotAFormError("its scale is a number of the graph, no tensor")
        swapped = self.multiplies and num_elements(x) != num_elements(self.node)
        return (scale, x) if swapped else (x, scale)

    def rounds(self, attention: Node) -> bool:
        """Whether the quotient is rounded to attention's dtype."""
        own = dtype_of(attention)
        return own != torch.float32 and any(dtype_of(node) == own for node in self.nodes)

    def check(self, attention: Node, scale: Node) -> None:
        """Refuse dtypes in which the operator does not compute."""
        own, quotient = dtype_of(attention), dtype_of(self.node)
        if own not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotAFormError(f"attention writes {own}; supported: float32, bfloat16, float16")
        for dtype in map(dtype_of, self.nodes):
            if dtype not in (own, torch.float32):
                raise NotAFormError(f"the quotient is converted to {dtype} on its way")
        if dtype_of(scale) != quotient and quotient != torch.float32:
            raise NotAFormError(
                f"its scale, {dtype_of(scale)} of no dimension, is rounded otherwise by each device"
            )
        if num_elements(self.node) != num_elements(attention):
            raise NotAFormError(f"{ODD_SHAPE}, or elements are repeated")

    def check_limits(self, scale: ComputedScale | None) -> None:
        """Refuse other limits than +-448. Without any, no quotient must lie beyond them.

        A computed scale keeps |x| / scale below 464, from where on FP8 is NaN, unless it is so
        small that it was rounded coarsely.
        """
        if (self.low, self.high) == (-FP8_MAX, FP8_MAX):
            return
        if (self.low, self.high) != (-math.inf, math.inf):
            raise NotAFormError(f"values are not limited to +-{FP8_MAX}, but by other numbers")
        if scale is None or scale.options["min_scale"] < torch.finfo(scale.dtype).tiny:
            raise NotAFormError(f"values are not limited to +-{FP8_MAX}")


def _way_of_amax(scale: ComputedScale, attention: Node) -> list[Node]:
    """The nodes between attention and an amax that must be of the same attention."""
    source, way = way_to_attention(scale.source, absolute=not scale.is_absolute)
    if source is not attention:
        raise NotAFormError("its scale is another attention's")
    return way


def _share(scale: ComputedScale, attention: Node) -> str | int:
    num_tokens, *heads = (expression(size) for size in value_of(attention).shape)
    width = math.prod(heads, start=expression(1))
    if scale.share == width:
        return "row"
    if scale.share == num_tokens * width:
        return "batch"
    if not scale.share.is_Integer or width % scale.share != 0:
        raise NotAFormError(f"{scale.share} values share a scale, which is no part of a row")
    return int(scale.share)


def _form(share: str | int, options: dict[str, Any]) -> tuple[Form, OutputQuant]:
    form = next((form for form in FORMS if form.share == share), None)
    if form is None:
        known = ", ".join(str(form.share) for form in FORMS if isinstance(form.share, int))
        raise NotAFormError(f"{share} values share a scale; supported: {known}, a row, all")
    try:
        return form, OutputQuant(form.scheme, **options)
    except ValueError as error:
        raise NotAFormError(str(error)) from None
