"""A product of an RMSNorm becomes one operator."""

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.passes.rms_norms import (
    SKINNY,
    as_rows,
    behind_views,
    fuses,
    is_whole,
    norm_arguments,
    norm_before,
    product_of,
    sizes_of,
)

_NORM_MM = torch.ops.attn_ops.norm_mm.default


class NormProducts(Pass):
    """Replace a product of an RMSNorm by `norm_mm`: for few rows one kernel, and not two.

    Before::

        T: int; x: f32[T, 128]; g: f32[128]; w: f32[256, 128]
        pow_1 = aten.pow.Tensor_Scalar(x, 2)
        mean = aten.mean.dim(pow_1, [-1], True)
        add = aten.add.Tensor(mean, 1e-06)
        rsqrt = aten.rsqrt(add)
        mul = aten.mul.Tensor(x, rsqrt)
        mul_1 = aten.mul.Tensor(g, mul)
        permute = aten.permute(w, [1, 0])
        mm = aten.mm(mul_1, permute)
        return mm

    After::

        permute = aten.permute(w, [1, 0])
        norm_mm = attn_ops.norm_mm(x, g, 1e-06, permute)
        return norm_mm

    Skipped when:
        - something else reads the normalized rows, such as another product;
        - no kernel for few rows takes a weight on a GPU;
        - the mode is not "always": called steps would lose by it.
    """

    name = "norm_products"
    stage = "aten"
    needs_inference = True
    looks_for = "product of an RMSNorm"

    def __init__(self, mode: str = "auto", ordered: bool = False) -> None:
        super().__init__()
        self.mode, self.ordered = mode, ordered

    @classmethod
    def of(cls, config: PassConfig) -> "NormProducts":
        return cls(config.norm_products, config.batch_invariant)

    def settings(self) -> dict[str, object]:
        return {"norm_products": self.mode, "batch_invariant": self.ordered}

    def apply(self, graph: Graph) -> int:
        return sum(
            self._rewrite(graph, node)
            for node in list(graph.nodes)
            if node.target in (aten.mm.default, SKINNY)
        )

    def _rewrite(self, graph: Graph, node: Node) -> bool:
        product = product_of(node)
        if product is None:
            return False
        found, norm = behind_views(product.x), norm_before(product.x)
        if norm is None or not is_whole(value_of(norm.source)):
            return False
        if value_of(norm.source).dim() != 2 and sizes_of(product.x) is None:
            return False
        if len(found.users) > 1 or len(product.x.users) > 1:
            self.skip("something else reads the normalized rows", node.name)
            return False
        if self.mode != "always":
            self.skip("called steps would lose by it", node.name)
            return False
        if not fuses(product.w, ordered=self.ordered):
            self.skip("no kernel for few rows takes a weight", node.name)
            return False
        with graph.inserting_before(node):
            rows = as_rows(graph, norm.source, product.x)
            weight, named = norm_arguments(norm)
            args = (rows, weight, norm.eps, product.w)
            args += () if product.bias is None else (product.bias,)
            named |= {"ordered": True} if self.ordered else {}
            new = graph.create_node("call_function", _NORM_MM, args, named, name="norm_mm")
        new.meta = {key: what for key, what in node.meta.items() if key != "eager_input_vals"}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return True
