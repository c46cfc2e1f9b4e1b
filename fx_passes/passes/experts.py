"""A mixture of experts becomes one operator."""

import operator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from attn_ops.ops.moe.experts import takes_experts
from fx_passes.analysis.graph_ops import aten
from fx_passes.analysis.sizes import equal, expression
from fx_passes.analysis.steps import limited, number_of
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass
from fx_passes.config import PassConfig
from fx_passes.passes.expert_gates import Gate, gate_of, same_of
from fx_passes.passes.rms_norms import (
    CONVERT,
    as_rows,
    behind_views,
    factors,
    is_tensor,
    is_whole,
    sizes_of,
    terms,
)

_EXPERTS = torch.ops.attn_ops.experts.default
_DIVIDE = aten.div.Tensor_mode
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_FALLBACK = "transformers.grouped_mm_fallback.default"
"""Transformers' operator for dtypes and devices that `_grouped_mm` does not take."""


class NotExpertsError(Exception):
    """Why nodes are no mixture of experts that the operator computes."""


class Routing(NamedTuple):
    """In which order pairs of a row and an expert are multiplied."""

    ids: Node  # [S], the expert of each pair
    order: Node | None  # [S], the pair of each multiplied row; None: that of the pairs


class Product(NamedTuple):
    """Rows times the weights of their experts, plus the biases."""

    rows: Node
    w: Node  # [E, M, K], or [E, K, M] if `turned`
    turned: bool
    bias: Node | None  # [E, M]
    node: Node


class Mixture(NamedTuple):
    """What the operator is called with; all but `x`, the weights and the biases are flat."""

    x: Node
    routing: Routing
    weights: Node
    up: Product
    down: Product
    gate: Gate


class Experts(Pass):
    """Replace the products of a mixture of experts, with all that is around them, by `experts`.

    Transformers sorts pairs of a row and an expert, gathers rows, multiplies them by two grouped
    products and puts them back: a dozen kernels, made for hundreds of rows an expert. The operator
    has four, which read the weights of chosen experts once where there are few rows. What the
    result is added to, such as a layer's input, is added by the last of them.

    Before::

        T: int; x: bf16[T, 8]; r: bf16[T, 4]; w: bf16[4, 16, 8]; d: bf16[4, 8, 8]
        topk = aten.topk(r, 2); chosen = topk[0]; ids = topk[1]
        weights = aten.view(chosen, [-1]); flat = aten.view(ids, [-1])
        sort = aten.sort(flat); sorted_ids = sort[0]; order = sort[1]
        token = aten.div.Tensor_mode(order, 2, rounding_mode="floor")
        rows = aten.index.Tensor(x, [token])
        numbers = prims.convert_element_type(sorted_ids, torch.float32)
        counts = aten.histc(numbers, 4, 0, 3); ends = aten.cumsum(counts, 0, dtype=torch.int32)
        w_kf = aten.permute(w, [0, 2, 1]); up = aten._grouped_mm(rows, w_kf, ends)
        gate = aten.slice.Tensor(up, 1, 0, 8); other = aten.slice.Tensor(up, 1, 8, 16)
        wide = prims.convert_element_type(gate, torch.float32); sigmoid = aten.sigmoid(wide)
        silu = aten.mul.Tensor(wide, sigmoid); product = aten.mul.Tensor(silu, other)
        gated = prims.convert_element_type(product, torch.bfloat16)
        d_fk = aten.permute(d, [0, 2, 1]); down = aten._grouped_mm(gated, d_fk, ends)
        by_row = aten.index.Tensor(weights, [order]); column = aten.unsqueeze(by_row, -1)
        weighted = aten.mul.Tensor(down, column)
        size = aten.sym_size.int(order, 0); places = aten.arange(size)
        empty = aten.empty_like(order); back = aten.index_put(empty, [order], places)
        pairs = aten.index.Tensor(weighted, [back]); by_token = aten.view(pairs, [T, 2, 8])
        total = aten.sum.dim_IntList(by_token, [1])
        return total

    After::

        topk = aten.topk(r, 2); chosen = topk[0]; ids = topk[1]
        experts = attn_ops.experts(x, w, d, ids, chosen)
        return experts

    Skipped when:
        - the rows of a grouped product are not routed, weighted and summed as Transformers does;
        - something else reads a value between the first product and the sum;
        - the activation of the gate is not known;
        - no kernel takes the weights.
    """

    name = "experts"
    stage = "aten"
    needs_inference = True
    looks_for = "mixture of experts"

    def __init__(self, mode: str = "auto", ordered: bool = False) -> None:
        super().__init__()
        self.mode, self.ordered = mode, ordered

    @classmethod
    def of(cls, config: PassConfig) -> "Experts":
        return cls(config.experts, config.batch_invariant)

    def settings(self) -> dict[str, object]:
        return {"experts": self.mode, "batch_invariant": self.ordered}

    def apply(self, graph: Graph) -> int:
        matches, reasons = 0, {}
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            try:
                found = _mixture_of(node)
                self._rewrite(graph, node, found)
                matches += 1
            except NotExpertsError as error:
                reasons |= dict.fromkeys(_grouped_behind(node), str(error))
        if matches:
            for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
                _add_inside(graph, node)
            graph.eliminate_dead_code()
        for node in graph.nodes:
            if _is_grouped(node):
                default = "its rows are not summed as those of a mixture of experts"
                self.skip(reasons.get(node, default), node.name)
        return matches

    def _rewrite(self, graph: Graph, end: Node, found: Mixture) -> None:
        """Replace the sum `end`, if kernels take the weights."""
        x, weights = value_of(found.x), (found.up, found.down)
        outs = _ends(end, x.dtype)
        if self.ordered or self.mode != "always":
            shapes = [_turned(one) for one in weights]
            if not takes_experts(shapes[0], shapes[1], x.device):
                raise NotExpertsError("no kernel takes the weights")
        with graph.inserting_before(end):
            sizes = cast(list[Any], cast(Node, end.args[0]).args[1])[:2]
            args: list[Any] = [found.x, *(_as_stored(graph, one) for one in weights)]
            args += [_by_row(graph, one, sizes) for one in (found.routing.ids, found.weights)]
            if found.up.bias is not None or found.down.bias is not None:
                args += [found.up.bias, found.down.bias]
            keywords = found.gate.keywords() | ({"ordered": True} if self.ordered else {})
            new = graph.create_node(
                "call_function", _EXPERTS, tuple(args), keywords, name="experts"
            )
        new.meta["val"] = value_of(outs[0])
        for out in outs:
            out.replace_all_uses_with(new)
            graph.erase_node(out)
        if end not in outs:
            graph.erase_node(end)


# -- what nodes compute ----------------------------------------------------------------------------


def _mixture_of(end: Node) -> Mixture:
    """What ends in the sum `end` over a row's experts.

    Raises:
        NotExpertsError: it is something else.
    """
    pairs = cast(Node, end.args[0])
    by_row = pairs.target in _VIEWS and value_of(pairs).dim() == 3
    if not by_row or list(end.args[1:]) != [[1]] or end.kwargs:
        raise NotExpertsError("rows are not summed by token")
    num_rows, top_k, k = value_of(pairs).shape
    weighted = cast(Node, pairs.args[0])
    order = None
    if weighted.target is aten.index.Tensor:
        order, weighted = _inverted(weighted.args[1]), cast(Node, weighted.args[0])
    for y, factor in factors(weighted):
        weights = _flat_weights(factor, order)
        if weights is None:
            continue
        routing = _routing_of(y, order)
        down = _product_of(y, routing)
        gate = gate_of(down.rows)
        if gate is None:
            raise NotExpertsError("the activation of the gate is not known")
        up = _product_of(gate.source, routing)
        x = _gathered(_unmasked(up.rows, routing), routing, top_k)
        _check(x, (up, down), (num_rows, top_k, k))
        _check_readers(up.node, end)
        return Mixture(x, routing, weights, up, down, gate)
    raise NotExpertsError("rows are not weighted by the router")


def _check(x: Node, products: tuple[Product, Product], shape: tuple[Any, Any, Any]) -> None:
    """Shapes and dtypes are those of the operator."""
    rows, (num_rows, top_k, k) = value_of(x), shape
    up, down = (_turned(one) for one in products)
    fits = isinstance(top_k, int) and equal(tuple(rows.shape), (num_rows, k))
    wanted = (up.shape[0], k, up.shape[1] // 2)
    if not fits or up.shape[2] != k or not equal(tuple(down.shape), wanted):
        raise NotExpertsError("shapes are not those of a mixture of experts")
    biases = [value_of(one.bias) for one in products if one.bias is not None]
    if any(one.dtype != rows.dtype for one in (up, down, *biases)):
        raise NotExpertsError("rows and weights have several dtypes")


def _routing_of(y: Node, order: Node | None) -> Routing:
    """The flat experts by which pairs are sorted, or by which weights are gathered."""
    if order is not None:
        sort = cast(Node, order.args[0])
        return Routing(cast(Node, sort.args[0]), order)
    for node in _before(y):
        if node.target is aten.bmm.default:
            for factor in cast(tuple[Node, Node], node.args):
                if factor.target is aten.index.Tensor and value_of(factor).dim() == 3:
                    (ids,) = cast(list[Node], factor.args[1])
                    return Routing(ids, None)
    raise NotExpertsError("weights are not gathered by expert")


def _before(node: Node) -> list[Node]:
    """A node and what it is made of, as far back as its product is; the nearest first."""
    found = layer = [node]
    for _ in range(5):  # squeeze, unsqueeze, addition, squeeze, product
        layer = [source for one in layer for source in one.all_input_nodes]
        found = found + layer
    return found


def _inverted(indices: Any) -> Node:
    """The order of which `indices`, the index of a tensor, is the inverse.

    Raises:
        NotExpertsError: it is none of a sort.
    """
    put = indices[0] if len(indices) == 1 else None
    if isinstance(put, Node) and put.target is aten.index_put.default and len(put.args) == 3:
        _, places, values = cast(tuple[Any, Any, Any], put.args)
        order = places[0] if len(places) == 1 else None
        if isinstance(values, Node) and _counts_up(values) and _is_part(order, 1):
            sort = cast(Node, cast(Node, order).args[0])
            whole = equal(tuple(value_of(put).shape), tuple(value_of(cast(Node, order)).shape))
            upwards = len(sort.args) == 1 and not sort.kwargs
            if whole and upwards and value_of(cast(Node, sort.args[0])).dim() == 1:
                return cast(Node, order)
    raise NotExpertsError("rows are not put back in the order before the sort")


def _is_part(node: Any, index: int) -> bool:
    """Whether a node is the numbers (0) or the order (1) of a sort."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return False
    source, picked = node.args
    return bool(picked == index) and cast(Node, source).target is aten.sort.default


def _counts_up(node: Node) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if node.target is torch.ops.prims.iota.default:
        return (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    return node.target is aten.arange.default


def _flat_weights(node: Node, order: Node | None) -> Node | None:
    """The router's weights [S] by pair, if a node is them, [S, 1], in a routing's order."""
    if node.target is not aten.unsqueeze.default or value_of(node).dim() != 2:
        return None
    if expression(value_of(node).shape[1]) != 1:
        return None
    flat = cast(Node, node.args[0])
    if order is None:
        return flat
    if flat.target is not aten.index.Tensor or flat.args[1] != [order]:
        return None
    return cast(Node, flat.args[0])


def _product_of(node: Node, routing: Routing) -> Product:
    """The product by expert that a node is.

    Raises:
        NotExpertsError: it is none of all of that routing's pairs.
    """
    node, bias = _unmasked(same_of(node), routing), None
    if node.target is aten.add.Tensor and not node.kwargs:
        for product, addend in (node.args, node.args[::-1]):
            bias = _gathered_bias(addend, routing)
            if bias is not None:
                node = _unmasked(cast(Node, product), routing)
                break
    found = _grouped(node, routing) if routing.order is not None else _batched(node, routing)
    if found is None:
        raise NotExpertsError("its rows are not multiplied by the weights of their experts")
    return found._replace(bias=bias)


def _grouped(node: Node, routing: Routing) -> Product | None:
    if not _is_grouped(node) or len(node.args) != 3 or node.kwargs.get("out_dtype") is not None:
        return None
    rows, w, ends = cast(tuple[Node, Node, Node], node.args)
    if not _are_ends(ends, value_of(w).shape[0], routing):
        return None
    if w.target is aten.permute.default and w.args[1] == [0, 2, 1]:
        return Product(rows, cast(Node, w.args[0]), False, None, node)
    if w.target is aten.transpose.int and {d % 3 for d in cast(Any, w.args[1:])} == {1, 2}:
        return Product(rows, cast(Node, w.args[0]), False, None, node)
    return Product(rows, w, True, None, node)


def _batched(node: Node, routing: Routing) -> Product | None:
    """A product for each pair, with its weights gathered: [M, K] times a column, or the reverse."""
    if node.target is not aten.squeeze.dim or not isinstance(node.args[0], Node):
        return None
    bmm, dim = node.args[0], cast(int, node.args[1]) % 3
    if bmm.target is not aten.bmm.default or dim not in (1, 2):
        return None
    w, rows = cast(tuple[Node, Node], bmm.args if dim == 2 else bmm.args[::-1])
    gathered = w.target is aten.index.Tensor and w.args[1] == [routing.ids]
    if not gathered or rows.target is not aten.unsqueeze.default:
        return None
    if cast(int, rows.args[1]) % 3 != dim:
        return None
    return Product(cast(Node, rows.args[0]), cast(Node, w.args[0]), dim == 1, None, bmm)


def _are_ends(node: Node, num_experts: int, routing: Routing) -> bool:
    """Whether a node is where the sorted rows of each expert end."""
    if node.target is not aten.cumsum.default or node.args[1:] != (0,):
        return False
    counts = cast(Node, node.args[0])
    if counts.target is not aten.histc.default or counts.args[1:] != (
        num_experts, 0, num_experts - 1,
    ):  # fmt: skip
        return False
    sorted_ids = cast(Node, counts.args[0])
    if sorted_ids.target in (CONVERT, aten._to_copy.default):
        sorted_ids = cast(Node, sorted_ids.args[0])
    return _is_sorted(sorted_ids, routing)


def _is_sorted(node: Any, routing: Routing) -> bool:
    """Whether a node is the experts in a routing's order."""
    return _is_part(node, 0) and node.args[0] is cast(Node, routing.order).args[0]


def _gathered_bias(node: Any, routing: Routing) -> Node | None:
    """The biases [E, M] that a node has in a routing's order."""
    if not isinstance(node, Node) or node.target is not aten.index.Tensor:
        return None
    bias, (ids, *more) = cast(tuple[Node, list[Any]], node.args)
    if more or value_of(bias).dim() != 2:
        return None
    if routing.order is None:
        return bias if ids is routing.ids else None
    last = value_of(bias).shape[0] - 1
    if isinstance(ids, Node) and (found := limited(ids)) is not None:
        ids = found.source if (found.low, found.high) == (None, last) else ids
    return bias if _is_sorted(ids, routing) else None


def _unmasked(node: Node, routing: Routing) -> Node:
    """What is behind zeros in rows of pairs whose expert is none, which the operator leaves out."""
    if node.target is aten.masked_fill.Scalar:
        source, mask, zero = cast(tuple[Node, Node, Any], node.args)
    elif node.target is aten.where.self:
        mask, zero, source = cast(tuple[Node, Any, Node], node.args)
    else:
        return node
    above = mask.args[0] if mask.target is aten.unsqueeze.default else None
    if not isinstance(above, Node) or above.target is not aten.ge.Scalar or number_of(zero) != 0:
        return node
    is_ours = routing.order is not None and _is_sorted(above.args[0], routing)
    return source if is_ours else node


def _gathered(node: Node, routing: Routing, top_k: int) -> Node:
    """x [T, K] of rows [S, K] in a routing's order.

    Raises:
        NotExpertsError: they are other rows.
    """
    if routing.order is not None and node.target is aten.index.Tensor:
        x, (rows, *more) = cast(tuple[Node, list[Any]], node.args)
        if not more and isinstance(rows, Node) and rows.args == (routing.order, top_k):
            floor = rows.kwargs == {"rounding_mode": "floor"}
            if rows.target is aten.floor_divide.default or (floor and rows.target is _DIVIDE):
                return x
    if routing.order is None and node.target in _VIEWS:
        copied = cast(Node, node.args[0])
        repeated = copied.args[0] if copied.target is aten.clone.default else copied
        if isinstance(repeated, Node) and repeated.target is aten.expand.default:
            one = cast(Node, repeated.args[0])
            if one.target is aten.unsqueeze.default and one.args[1] == 1:
                return cast(Node, one.args[0])
    raise NotExpertsError("rows are not those of the tokens that chose the expert")


def _check_readers(first: Node, end: Node) -> None:
    """Raise if a value from the product `first` to the sum `end` would have to stay."""
    seen, todo = {end}, list(first.users)
    while todo:
        node = todo.pop()
        if node in seen or node.target is aten.sym_size.int:
            continue
        if node.op == "output" or end < node:
            raise NotExpertsError(
                "something else reads a value between the first product and the sum"
            )
        seen.add(node)
        todo += node.users


def _is_grouped(node: Node) -> bool:
    return node.target is aten._grouped_mm.default or str(node.target) == _FALLBACK


def _grouped_behind(end: Node) -> list[Node]:
    """Grouped products that a sum depends on, up to the next sum."""
    found, seen, todo = [], {end}, list(end.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in seen or node.target is aten.sum.dim_IntList:
            continue
        seen.add(node)
        found += [node] if _is_grouped(node) else []
        todo += node.all_input_nodes
    return found


# -- the operator's arguments ----------------------------------------------------------------------


def _turned(product: Product) -> torch.Tensor:
    """The value of a weight as [E, M, K]."""
    w = value_of(product.w)
    return w.transpose(1, 2) if product.turned else w


def _as_stored(graph: Graph, product: Product) -> Node:
    """A weight as [E, M, K]: the model's tensor, or a view of it."""
    if not product.turned:
        return product.w
    view = graph.call_function(aten.permute.default, (product.w, [0, 2, 1]))
    view.meta["val"] = _turned(product)
    return view


def _by_row(graph: Graph, flat: Node, sizes: list[Any]) -> Node:
    """[S] as [T, top_k]."""
    source = flat.args[0] if flat.target in _VIEWS else None
    top_k = sizes[1]
    if is_tensor(source):
        value = value_of(cast(Node, source))
        if value.dim() == 2 and expression(value.shape[1]) == expression(top_k):
            return cast(Node, source)
    view = graph.call_function(aten.view.default, (flat, sizes))
    view.meta["val"] = value_of(flat).view(-1, top_k)
    return view


def _add_inside(graph: Graph, total: Node) -> None:
    """Let `experts` add what nothing else than `total` adds its result to."""
    for part, addend in terms(total):
        experts = behind_views(part)
        alone = all(len(node.users) == 1 for node in (part, experts))
        if not alone or experts.target is not _EXPERTS or "residual" in experts.kwargs:
            continue
        x, sizes = cast(Node, experts.args[0]), sizes_of(part)
        flat = value_of(total).dim() == 2
        if not is_whole(value_of(addend)) or not (flat or (sizes and sizes_of(x))):
            continue
        with graph.inserting_before(total):
            named = {**experts.kwargs, "residual": as_rows(graph, addend, x)}
            new = graph.create_node("call_function", _EXPERTS, experts.args, named, name="experts")
            new.meta["val"] = result = value_of(experts)
            if not flat:
                new = graph.call_function(aten.view.default, (new, sizes))
                new.meta["val"] = result.view(value_of(total).shape)
        total.replace_all_uses_with(new)
        graph.erase_node(total)
        return


def _ends(end: Node, dtype: torch.dtype) -> list[Node]:
    """The nodes that hold the sum in `dtype`.

    Raises:
        NotExpertsError: something reads it in another one.
    """
    if value_of(end).dtype == dtype:
        return [end]
    users = list(end.users)
    if not users or any(
        user.target is not CONVERT or value_of(user).dtype != dtype for user in users
    ):
        raise NotExpertsError("the sum is read in another dtype than that of the rows")
    return users
