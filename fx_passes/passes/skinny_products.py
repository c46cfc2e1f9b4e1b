"""Matrix products go to an operator that is faster when a step has few rows."""

from typing import Any, cast

import torch
from torch.fx import Graph, Node

from attn_ops.ops.products.ordered_mm import takes_ordered
from attn_ops.ops.products.skinny_constants import most_rows
from attn_ops.ops.products.skinny_mm import takes
from fx_passes.analysis.graph_ops import PRODUCTS, VIEWS, aten
from fx_passes.analysis.sizes import equal, expression
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig

_SCALED = aten._scaled_mm.default
_SKINNY = torch.ops.attn_ops.skinny_mm.default


class SkinnyProducts(Pass):
    """Replace products with a weight by `skinny_mm`, which chooses by the number of rows.

    A decode step multiplies few rows by every weight, and takes as long as reading the weights
    does. cuBLAS reads them at 0.8 of the bandwidth; in FP8 its kernels are made for 128 rows.

    Before::

        T: int; x: bf16[T, 128]; w: bf16[256, 128]
        permute = aten.permute(w, [1, 0])
        mm = aten.mm(x, permute)
        return mm

    After::

        permute = aten.permute(w, [1, 0])
        skinny_mm = attn_ops.skinny_mm(x, permute)
        return skinny_mm

    Skipped when:
        - the second factor is not an input of the graph, read along its rows;
        - its dtype or shape, or the device, is not one that our kernel was measured with;
        - the number of rows is known, and more than our kernel takes;
        - an argument asks for more than a product and a bias.
    """

    name = "skinny_products"
    stage = "aten"
    needs_inference = True
    looks_for = "product with a weight"

    def __init__(self, mode: str = "auto", ordered: bool = False) -> None:
        super().__init__()
        self.mode, self.ordered = mode, ordered

    @classmethod
    def of(cls, config: PassConfig) -> "SkinnyProducts":
        return cls(config.skinny_products, config.batch_invariant)

    def settings(self) -> dict[str, object]:
        return {"skinny_products": self.mode, "batch_invariant": self.ordered}

    def apply(self, graph: Graph) -> int:
        matches = 0
        for node in list(graph.nodes):
            if node.target not in PRODUCTS and node.target is not _SCALED:
                continue
            asked = _asked_of(node)
            if asked is None:
                self.skip("an argument asks for more than a product and a bias", node.name)
                continue
            args, kwargs = asked
            if self.ordered:
                kwargs = {**kwargs, "ordered": True}
            if reason := self._why_not(args):
                self.skip(reason, node.name)
                continue
            with graph.inserting_before(node):
                new = graph.create_node("call_function", _SKINNY, args, kwargs, name="skinny_mm")
            new.meta = {key: what for key, what in node.meta.items() if key != "eager_input_vals"}
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            matches += 1
        return matches

    def _why_not(self, args: tuple[Any, ...]) -> str | None:
        x, w = (value_of(node) for node in args[:2])
        if self.ordered:
            return None if takes_ordered(w, w.device) else "it cannot be had in order"
        if not _is_weight(args[1]):
            return "the second factor is not an input of the graph"
        rows = x.shape[0]
        if isinstance(rows, int) and rows > most_rows(w):
            return "it has too many rows"
        if self.mode == "auto" and not takes(w, w.device):
            return "our kernel was not measured with its dtype, shape or device"
        return None


def _is_weight(node: Node) -> bool:
    while node.target in VIEWS:
        node = cast(Node, node.args[0])
    return node.op == "placeholder"


def _asked_of(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of `skinny_mm`; None if it cannot be asked."""
    if node.target is aten.mm.default:
        return node.args, {}
    if node.target is aten.addmm.default:
        bias, x, w = cast(tuple[Node, Node, Node], node.args)
        plain = node.kwargs.get("alpha", 1) == 1 and node.kwargs.get("beta", 1) == 1
        fits = equal(tuple(value_of(bias).shape), (value_of(w).shape[1],))
        return ((x, w, bias), {}) if plain and fits else None
    names = ("bias", "scale_result", "out_dtype", "use_fast_accum")
    more = dict(zip(names, node.args[4:], strict=False)) | dict(node.kwargs)
    x, w, x_scale, w_scale = node.args[:4]
    if more.get("scale_result") is not None or not _by_row_or_tensor(node):
        return None
    keywords = {"x_scale": x_scale, "w_scale": w_scale, "out_dtype": more.get("out_dtype")}
    if more.get("use_fast_accum"):
        keywords["fast_accum"] = True
    return (x, w, more.get("bias")), keywords


def _by_row_or_tensor(node: Node) -> bool:
    """Whether a product's scales are float32 of a row or of all."""
    w, x_scale, w_scale = (value_of(cast(Node, one)) for one in node.args[1:4])
    if x_scale.dtype != torch.float32 or w_scale.dtype != torch.float32:
        return False
    by_row = list(x_scale.shape[1:]) == [1] and list(w_scale.shape) == [1, w.shape[1]]
    return by_row or all(expression(scale.numel()) == 1 for scale in (x_scale, w_scale))
