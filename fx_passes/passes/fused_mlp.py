"""A layer's second half, from the addition behind attention on, becomes one operator."""

from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.passes.rms_norms import (
    Norm,
    Product,
    as_rows,
    behind_views,
    fuses,
    gated_of,
    half_of,
    is_whole,
    norm_arguments,
    norm_before,
    product_of,
    sizes_of,
    terms,
)

_MLP = torch.ops.attn_ops.gated_mlp.default


class Mlp(NamedTuple):
    """x + residual, its norm, a gated product, and the product down."""

    total: Node  # x + residual
    norm: Norm
    up: Product  # of gate and up
    down: Product
    view: Node  # of the last product, of the shape of `total`


class FusedMlp(Pass):
    """Replace addition, RMSNorm, gated products and addition by `gated_mlp`.

    For few rows that is two kernels and not five. The gate and up projections must be merged.

    Before::

        T: int; x: f32[T, 128]; r: f32[T, 128]; g: f32[128]; w: f32[512, 128]; d: f32[128, 256]
        add = aten.add.Tensor(r, x)
        pow_1 = aten.pow.Tensor_Scalar(add, 2)
        mean = aten.mean.dim(pow_1, [-1], True)
        add_1 = aten.add.Tensor(mean, 1e-06)
        rsqrt = aten.rsqrt(add_1)
        mul = aten.mul.Tensor(add, rsqrt)
        mul_1 = aten.mul.Tensor(g, mul)
        permute = aten.permute(w, [1, 0])
        mm = aten.mm(mul_1, permute)
        gate = aten.slice.Tensor(mm, 1, 0, 256)
        sigmoid = aten.sigmoid(gate)
        silu = aten.mul.Tensor(gate, sigmoid)
        up = aten.slice.Tensor(mm, 1, 256, 512)
        mul_2 = aten.mul.Tensor(silu, up)
        permute_1 = aten.permute(d, [1, 0])
        mm_1 = aten.mm(mul_2, permute_1)
        add_2 = aten.add.Tensor(add, mm_1)
        return add_2

    After::

        permute = aten.permute(w, [1, 0])
        permute_1 = aten.permute(d, [1, 0])
        gated_mlp = attn_ops.gated_mlp(r, x, g, 1e-06, permute, permute_1)
        return gated_mlp

    Skipped when:
        - something else reads a value between the first addition and the last;
        - no kernel for few rows takes a weight on a GPU;
        - the mode is not "always": called steps would lose by it.
    """

    name = "fused_mlp"
    stage = "aten"
    needs_inference = True
    looks_for = "gated products between two additions"

    def __init__(self, mode: str = "auto", ordered: bool = False) -> None:
        super().__init__()
        self.mode, self.ordered = mode, ordered

    @classmethod
    def of(cls, config: PassConfig) -> "FusedMlp":
        return cls(config.fused_mlp, config.batch_invariant)

    def settings(self) -> dict[str, object]:
        return {"fused_mlp": self.mode, "batch_invariant": self.ordered}

    def apply(self, graph: Graph) -> int:
        added = graph.find_nodes(op="call_function", target=aten.add.Tensor)
        return sum(self._rewrite(graph, node) for node in added)

    def _rewrite(self, graph: Graph, node: Node) -> bool:
        mlp = _mlp_of(node)
        if mlp is None:
            return False
        if reason := _read_between(mlp, node):
            self.skip(reason, node.name)
            return False
        if self.mode != "always":
            self.skip("called steps would lose by it", node.name)
            return False
        if not fuses(mlp.up.w, mlp.down.w, ordered=self.ordered):
            self.skip("no kernel for few rows takes a weight", node.name)
            return False
        with graph.inserting_before(node):
            first, second = (as_rows(graph, cast(Node, x), mlp.up.x) for x in mlp.total.args)
            weight, named = norm_arguments(mlp.norm)
            args = (first, second, weight, mlp.norm.eps, mlp.up.w, mlp.down.w)
            named |= {"ordered": True} if self.ordered else {}
            new = graph.create_node("call_function", _MLP, args, named, name="gated_mlp")
            new.meta["val"] = torch.empty_like(value_of(first))
            result = new
            if value_of(node).dim() != 2:
                sizes = sizes_of(mlp.view)
                result = graph.call_function(aten.view.default, (new, sizes))
                result.meta["val"] = value_of(new).view(value_of(node).shape)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        return True


def _mlp_of(node: Node) -> Mlp | None:
    """What ends in the addition `node`."""
    for total, product in terms(node):
        down = product_of(behind_views(product))
        if down is None or down.bias is not None:
            continue
        pair = gated_of(behind_views(down.x))
        if pair is None:
            continue
        merged: Any = behind_views(pair[0].args[0] if pair[0].args else None, shared=True)
        up = product_of(merged)
        if up is None or up.bias is not None:
            continue
        if not half_of(pair[0], merged, second=False) or not half_of(pair[1], merged, second=True):
            continue
        norm = norm_before(up.x)
        if norm is None or norm.source is not total or len(terms(total)) != 2:
            continue
        flat = value_of(total).dim() == 2
        if not flat and (sizes_of(up.x) is None or sizes_of(product) is None):
            continue
        if all(is_whole(value_of(x)) for x in (total, *cast(tuple[Node, ...], total.args))):
            return Mlp(total, norm, up, down, product)
    return None


def _read_between(mlp: Mlp, end: Node) -> str | None:
    """Why a value between must be there; None: only the operator would read them."""
    inside: set[Node] = {end}
    todo = [node for node in end.all_input_nodes if node is not mlp.total]
    bounds = {mlp.norm.weight, mlp.up.w, mlp.down.w, mlp.total}
    while todo:
        node = todo.pop()
        if node in inside or node in bounds or node.op == "placeholder":
            continue
        inside.add(node)
        todo += node.all_input_nodes
    read = {user for node in (*inside - {end}, mlp.total) for user in node.users}
    sizes = {node for node in read if node.target is aten.sym_size.int}
    if read - inside - sizes:
        return "something else reads a value between the first addition and the last"
    return None
