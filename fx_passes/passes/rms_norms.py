"""What stands around products in a graph: an RMSNorm, a gate's SiLU, views of rows."""

from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from attn_ops.ops.products.fused_products import takes_fused
from attn_ops.ops.products.ordered_mm import takes_ordered
from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import equal, expression
from fx_passes.analysis.values import value_of

CONVERT = torch.ops.prims.convert_element_type.default
_CONVERTS = (CONVERT, aten._to_copy.default)
SKINNY = torch.ops.attn_ops.skinny_mm.default
_WITH_SIZES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_ROW_VIEWS = _WITH_SIZES | {aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default}


class Norm(NamedTuple):
    """RMSNorm(source) * weight."""

    source: Node
    weight: Node  # [K]
    eps: float


class Product(NamedTuple):
    """x @ w + bias, without scales."""

    x: Node
    w: Node
    bias: Node | None


def is_tensor(node: Any) -> bool:
    """Whether it is a node whose value is a tensor; sizes and numbers of a graph are none."""
    return isinstance(node, Node) and isinstance(value_of(node), torch.Tensor)


def product_of(node: Any) -> Product | None:
    """The plain product that a node is."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.mm.default:
        x, w = node.args
        return Product(cast(Node, x), cast(Node, w), None)
    asked = [v for name, v in node.kwargs.items() if name != "ordered"]
    if node.target is not SKINNY or any(v is not None for v in asked):
        return None
    x, w, bias = (*node.args, None)[:3]
    return Product(cast(Node, x), cast(Node, w), cast(Node | None, bias))


def fuses(*weights: Node, ordered: bool = False) -> bool:
    """Whether kernels take the weights [K, M]. Without a GPU nothing has to be fast."""
    found, takes = [value_of(w) for w in weights], takes_ordered if ordered else takes_fused
    return all(not w.is_cuda or takes(w, w.device) for w in found)


def behind_views(node: Any, *, shared: bool = False) -> Any:
    """What a node is a view of, as long as the last dimension stays what it is.

    A view that several nodes read is looked behind if they may share it.
    """
    while isinstance(node, Node) and node.target in _ROW_VIEWS:
        if len(node.users) > 1 and not shared:
            break
        source = cast(Node, node.args[0])
        if not _same_columns(value_of(source), value_of(node)):
            break
        node = source
    return node


def _same_columns(a: torch.Tensor, b: torch.Tensor) -> bool:
    both = a.dim() > 0 and b.dim() > 0
    return both and expression(a.shape[-1]) == expression(b.shape[-1])


def norm_of(node: Any, *, wide_weight: bool = False) -> Norm | None:
    """The RMSNorm that a node is, in float32 or in wider: weight * x * rsqrt(mean(x * x) + eps).

    It may be rounded before it is multiplied by the weight, or with `wide_weight` behind that: the
    weight is then in float32. Nothing else reads a value between.
    """
    converted = wide_weight and is_tensor(node) and node.target in _CONVERTS
    norm = _weighted(node.args[0] if converted else node, wide_weight=wide_weight)
    kept = norm is not None and value_of(node).dtype == value_of(norm.source).dtype
    return norm if kept else None


def _weighted(node: Any, *, wide_weight: bool) -> Norm | None:
    """The norm of rows in any dtype that a node, in the dtype of its weight, is."""
    for weight, rest in factors(node):
        if value_of(weight).dim() != 1:
            continue
        dtype = value_of(weight).dtype
        for wide, factor in factors(unconverted(rest, dtype)):
            source = unconverted(wide, dtype)
            eps = _eps(factor, wide)
            rows, columns = value_of(source), value_of(weight)
            wanted = torch.float32 if rows.dtype != torch.float64 else torch.float64
            fits = columns.dtype == (wanted if wide_weight else rows.dtype)
            if eps is None or not fits or not _same_columns(rows, columns):
                continue
            if value_of(wide).dtype == wanted and value_of(node).dtype == columns.dtype:
                return Norm(source, weight, eps)
    return None


def norm_before(product: Any) -> Norm | None:
    """The RMSNorm that a product is of, by a weight in the rows' dtype or in float32."""
    rows = behind_views(product)
    return norm_of(rows) or norm_of(rows, wide_weight=True)


def norm_arguments(norm: Norm) -> tuple[Node, dict[str, Any]]:
    """The weight that the model holds, and `norm_offset` where a number is added in float32."""
    total = norm.weight
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return norm.weight, {}
    weight, offset = total.args
    wide = value_of(total).dtype.itemsize >= torch.float32.itemsize
    if not wide or not isinstance(offset, float | int) or not isinstance(weight, Node):
        return norm.weight, {}
    return unconverted(weight, value_of(weight).dtype), {"norm_offset": float(offset)}


def factors(node: Any) -> list[tuple[Node, Node]]:
    """Both orders of a product of two tensors."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor:
        return []
    a, b = cast(tuple[Node, Node], node.args)
    return [(a, b), (b, a)] if is_tensor(a) and is_tensor(b) else []


def terms(node: Node) -> list[tuple[Node, Node]]:
    """Both orders of a sum of two tensors of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    a, b = cast(tuple[Node, Node], node.args)
    if not is_tensor(a) or not is_tensor(b):
        return []
    x, y = value_of(a), value_of(b)
    same = x.dtype == y.dtype and equal(tuple(x.shape), tuple(y.shape))
    return [(a, b), (b, a)] if same else []


def unconverted(node: Any, dtype: torch.dtype) -> Any:
    """What a conversion converts that keeps values of `dtype`; of `_to_copy`, one of that alone."""
    if not isinstance(node, Node):
        return node
    copied = node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}
    if not copied and node.target is not CONVERT:
        return node
    to = value_of(node).dtype
    keeps = to == dtype or (to.is_floating_point and to.itemsize > dtype.itemsize)
    return node.args[0] if keeps else node


def _eps(factor: Node, wide: Node) -> float | None:
    """eps, if `factor` is rsqrt(mean(wide * wide) + eps)."""
    if factor.target is not aten.rsqrt.default:
        return None
    total = cast(Node, factor.args[0])
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return None
    mean, eps = total.args
    if not isinstance(mean, Node) or mean.target is not aten.mean.dim or mean.kwargs:
        return None
    square, dims, *keep = mean.args
    rank = value_of(wide).dim()
    over_columns = dims in ([-1], [rank - 1]) and keep == [True]
    if not over_columns or not isinstance(eps, float | int) or not _is_square(square, wide):
        return None
    return float(eps)


def _is_square(node: Any, of: Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return node.args == (of, 2)
    return node.target is aten.mul.Tensor and node.args == (of, of)


def gated_of(node: Any) -> tuple[Node, Node] | None:
    """(gate, up) of SiLU(gate) * up."""
    for silu, factor in factors(node):
        dtype = value_of(node).dtype
        gate, up = _silu(unconverted(silu, dtype), dtype), unconverted(factor, dtype)
        if gate is not None and up is not gate:
            return gate, up
    return None


def _silu(node: Any, dtype: torch.dtype) -> Node | None:
    """x of x / (1 + exp(-x)), x * sigmoid(x) or silu(x), in `dtype` or wider."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.silu.default:
        return unconverted(node.args[0], dtype)
    for x, sigmoid in factors(node):
        if sigmoid.target is aten.sigmoid.default and sigmoid.args[0] is x:
            return unconverted(x, dtype)
    if node.target is not aten.div.Tensor:
        return None
    x, below = cast(tuple[Node, Node], node.args)
    if not isinstance(below, Node) or below.target is not aten.add.Tensor or below.kwargs:
        return None
    power, one = below.args
    if one != 1 or not isinstance(power, Node) or power.target is not aten.exp.default:
        return None
    minus = cast(Node, power.args[0])
    return (
        unconverted(x, dtype) if minus.target is aten.neg.default and minus.args[0] is x else None
    )


def half_of(node: Node, product: Node, second: bool) -> bool:
    """Whether a node is the first half of a product's columns, or the second."""
    if node.target not in (aten.slice.Tensor, aten.as_strided.default):
        return False
    if behind_views(node.args[0], shared=True) is not product:
        return False
    half, whole = value_of(node), value_of(product)
    width = whole.shape[1]
    if not isinstance(width, int) or width % 2 or half.dim() not in (2, 3):
        return False
    rows = half.shape[-2] if half.dim() == 2 or expression(half.shape[0]) == 1 else None
    placed = half.storage_offset() - whole.storage_offset() == (width // 2 if second else 0)
    return (
        rows is not None
        and placed
        and equal((rows, half.shape[-1]), (whole.shape[0], width // 2))
        and equal(half.stride()[-2:], (width, 1))
    )


def sizes_of(node: Node) -> list[Any] | None:
    """The sizes of a view as its graph's nodes; None: none of them is at hand."""
    if node.target in _WITH_SIZES:
        return cast(list[Any], node.args[1])
    shape = list(value_of(node).shape)
    return shape if all(isinstance(size, int) for size in shape) else None


def as_rows(graph: Graph, node: Node, like: Node) -> Node:
    """`node` as [T, K], as `like` is, whose sizes are at hand; itself if it has two dimensions."""
    if value_of(node).dim() == 2:
        return node
    view = graph.call_function(aten.view.default, (node, sizes_of(like)))
    view.meta["val"] = value_of(node).view(value_of(like).shape)
    return view


def is_whole(x: torch.Tensor) -> bool:
    """Whether x can be viewed as rows, without a question that leaves a guard."""
    strides, expected = list(x.stride()), 1
    for size, stride in zip(reversed(x.shape), reversed(strides), strict=True):
        if expression(size) != 1 and expression(stride) != expression(expected):
            return False
        expected = expected * size
    return True
