"""Attention that is followed by its quantization writes FP8 itself."""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from attn_ops.output_quant.schemes import OutputQuant
from fx_passes.analysis.graph_ops import (
    ATTENTION,
    PRODUCTS,
    QUANTIZED_FORM,
    VIEWS,
    aten,
    computed_from,
)
from fx_passes.analysis.quantize_forms import ODD_SHAPE, Quantized, recognise
from fx_passes.analysis.row_count import RowCount
from fx_passes.analysis.sizes import equal, expression, multiple
from fx_passes.analysis.steps import NotAFormError, converted, dtype_of
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig

_NARROW = {
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.int8,
}  # fmt: skip
"""Dtypes that a quantization converts to."""

_EAGER = "eager_input_vals"
"""Where AOTAutograd notes an operator's arguments, whose strides Inductor keeps."""

_REDUCTIONS = {
    aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default, aten.max.dim,
    aten.mean.dim, aten.sum.dim_IntList, aten.linalg_vector_norm.default, aten.expand.default,
    aten.clone.default, operator.getitem,
}  # fmt: skip


class QuantizeOutput(Pass):
    """Replace attention, and the quantization of its output to FP8, by `attention_quant`.

    A quantized model quantizes attention's output before the output projection. TRITON's kernel for
    single tokens writes FP8 itself, by a given scale or by groups; other schemes and batches are
    quantized by our kernel after attention, which is faster than Inductor's. Latent attention
    becomes `mla_attention_quant`.

    Before::

        T: int; meta: AttentionMetadata; q: f32[T, 2, 8]; cache: f32[3, 2, 4, 2, 8]
        attention = attn_ops.attention(q, cache, meta, 0.25)
        x = aten.view(attention, [1, T, 16])
        size = aten.abs(x); amax = aten.amax(size, [2], True)
        scale = aten.div.Tensor(amax, 448.0); div = aten.div.Tensor(x, scale)
        low = aten.clamp_min(div, -448.0); high = aten.clamp_max(low, 448.0)
        fp8 = prims.convert_element_type(high, torch.float8_e4m3fn)
        rows = aten.view(fp8, [T, 16])
        return (rows, scale)

    After::

        attention_quant = attn_ops.attention_quant(q, cache, meta, 0.25, scheme='fp8_row')
        out = attention_quant[0]; scales = attention_quant[1]
        fp8_1 = aten.view(out, [1, T, 16])
        scale_1 = aten.view(scales, [1, T, 1])
        rows = aten.view(fp8_1, [T, 16])
        return (rows, scale_1)

    `quantize_forms` recognises what is computed, in whatever nodes. Scales and FP8 values are those
    of the graph's nodes, computed one by one. Inductor alone leaves out roundings to bfloat16
    between nodes that it fuses; the operator keeps them.

    Skipped when:
        - something else reads the unquantized output, or a value on the way: it is needed anyhow;
        - it is quantized to another dtype than float8_e4m3fn;
        - it is quantized to NVFP4, whose bits libraries put together in their own ways;
        - something is computed between attention and its quantization, such as a gate;
        - values are limited to other numbers than +-448, or not at all;
        - the scale is computed otherwise than amax / 448, or rounds otherwise;
        - the scale is another attention's, or a tensor that is not computed from the output and has
          several elements;
        - the scale is on another device, as a number on the host may be;
        - the values that share a scale are no row, batch or group of 64 or 128 in a row;
        - attention writes float64;
        - a shape is neither a number nor a multiple of the row count;
        - `attn_quant` is "auto", and it is on a CPU, where our form is plain PyTorch;
        - `attn_quant` is "auto", and a scale is that of the whole batch: Inductor's is faster.
    """

    name = "quantize_output"
    stage = "aten"
    switch = "attn_quant"
    needs_inference = True
    looks_for = "quantization behind attention"

    def __init__(self, mode: str = "auto") -> None:
        super().__init__()
        self.mode = mode

    @classmethod
    def of(cls, config: PassConfig) -> "QuantizeOutput":
        return cls(config.attn_quant)

    def settings(self) -> dict[str, object]:
        return {"attn_quant": self.mode}

    def apply(self, graph: Graph) -> int:
        sites: dict[str, str] = {}
        for values, attention in list(_candidates(graph)):
            try:
                site = recognise(values, attention)
                self._check(site)
            except NotAFormError as reason:
                self.skip(str(reason), attention.name)
                continue
            _rewrite(graph, site)
            sites[site.attention.name] = site.form.scheme
        self.facts = {"sites": sites} if sites else {}
        return len(sites)

    def _check(self, site: Quantized) -> None:
        """Refuse a site that cannot be rewritten, or would gain nothing."""
        if (reader := site.other_reader()) is not None:
            what = "the graph returns" if reader.op == "output" else f"{reader.name} reads"
            raise NotAFormError(f"{what} the unquantized output, or a value on its way")
        _check_shapes(site)
        if self.mode == "auto" and (
            reason := why_slower(site.form.scheme, value_of(site.attention).device)
        ):
            raise NotAFormError(reason)

    def summary(self) -> str | None:
        schemes = dict.fromkeys(self.facts.get("sites", {}).values())
        return f"attention writes {' and '.join(schemes)}" if schemes else None


def why_slower(scheme: str, device: torch.device) -> str | None:
    """Why "auto" leaves a scheme to Inductor; None: ours is as fast or faster.

    Attention and its output in FP8 by ours and by Inductor's kernel, microseconds a layer for 1 and
    64 requests of 1,024 tokens and a prompt of 2,048 (one H200, 2026-11-23): fp8_static 6.4 for
    8.4, 65.8 for 67.0, 79.4 for 81.2; fp8_group128 6.4 for 10.0, 66.4 for 68.7, 79.5 for 82.1;
    fp8_row after attention 9.0 for 9.3, 67.6 for 67.1, 80.0 for 86.1; fp8_tensor 11.7 for 8.9,
    71.3 for 70.6, 88.0 for 89.1.
    """
    if device.type == "cpu":
        return "on a CPU the output would be quantized by plain PyTorch"
    if scheme == "fp8_tensor":
        return "a scale of the whole batch takes two kernels of ours: Inductor's is faster"
    return None


def _candidates(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Conversions to narrow dtypes behind an attention, without a product between, and which."""
    for node in graph.nodes:
        if node.op == "call_function" and converted(node) is not None and dtype_of(node) in _NARROW:
            found = (one for one in computed_from(node, _is_passed) if one.target in ATTENTION)
            if (attention := next(found, None)) is not None:
                yield node, attention


def _is_passed(node: Node) -> bool:
    """Whether it is computed element by element, or reduces or spreads what is."""
    if node.target in VIEWS or node.target in _REDUCTIONS or converted(node) is not None:
        return True
    target = node.target
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return pointwise and target not in PRODUCTS


# -- rewriting -------------------------------------------------------------------------------------


def _check_shapes(site: Quantized) -> None:
    """Refuse shapes that no argument of a view can say."""
    rows = expression(value_of(site.attention).shape[0])
    sizes = [size for node in (site.values, *site.scales) for size in value_of(node).shape]
    for size in (*sizes, *(value_of(node) for node in site.sizes())):
        if isinstance(size, torch.SymInt) and multiple(expression(size), rows) is None:
            raise NotAFormError(ODD_SHAPE)


def _rewrite(graph: Graph, site: Quantized) -> None:
    """Put the operator after attention and a given scale, and views of its results in place of the
    nodes.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in (site.attention, site.given) if node is not None]
    last = max(inputs, key=place.__getitem__)
    new = _New(graph, site.attention)
    with graph.inserting_before(last.next):
        out, scales = new.operator(site)
        for node in site.sizes():
            size = RowCount(graph, out).argument(value_of(node))
            node.replace_all_uses_with(cast(Node, size))
        for node, result in [(site.values, out), *((node, scales) for node in site.scales)]:
            if node.users:
                node.replace_all_uses_with(new.like(result, node))


class _New:
    """Nodes with their values, where the graph stands; they come from `origin`."""

    def __init__(self, graph: Graph, origin: Node) -> None:
        self.graph, self.origin = graph, origin
        own = ("val", _EAGER)
        self.meta = {key: what for key, what in origin.meta.items() if key not in own}

    def operator(self, site: Quantized) -> tuple[Node, Node]:
        """The quantized form with what attention was given: its output and its scales."""
        defaults = OutputQuant(site.form.scheme)
        how = {
            field.name: getattr(site.how, field.name)
            for field in dataclasses.fields(OutputQuant)
            if getattr(site.how, field.name) != getattr(defaults, field.name)
        }
        given = (
            {} if site.given is None else {"out_scale": self._converted(site.given, torch.float32)}
        )
        unquantized = value_of(self.origin)
        with unquantized.fake_mode:
            values = site.how.empty(unquantized)
        more = {"scheme": site.form.scheme, **given, **how}
        keywords = {**more, **self.origin.kwargs}
        target = QUANTIZED_FORM[cast(Any, self.origin.target)]
        name = target.overloadpacket.__name__
        both = self._call(name, target, self.origin.args, values, keywords)
        if _EAGER in self.origin.meta:
            args, kwargs = self.origin.meta[_EAGER]
            both.meta[_EAGER] = args, {**map_arg(more, value_of), **kwargs}
        out, scales = (
            self._call(part, operator.getitem, (both, i), value)
            for i, (part, value) in enumerate(zip(("out", "scales"), values, strict=True))
        )
        return out, scales

    def like(self, result: Node, node: Node) -> Node:
        """`result` in the shape and the dtype of `node`."""
        shape = value_of(node).shape
        sizes = [RowCount(self.graph, result).argument(size) for size in shape]
        if not equal(shape, value_of(result).shape):
            with value_of(result).fake_mode:
                value = value_of(result).view(shape)
            result = self._call(node.name, aten.view.default, (result, sizes), value)
        return self._converted(result, dtype_of(node))

    def _converted(self, node: Node, dtype: torch.dtype) -> Node:
        if dtype_of(node) == dtype:
            return node
        with value_of(node).fake_mode:
            value = value_of(node).to(dtype)
        convert = torch.ops.prims.convert_element_type.default
        return self._call(node.name, convert, (node, dtype), value)

    def _call(self, name: str, target: Any, args: Any, value: Any, kwargs: Any = None) -> Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = {**self.meta, "val": value}
        return node
