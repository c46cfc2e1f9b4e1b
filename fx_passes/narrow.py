"""Compute of a batched product only the part that others take of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.base import Pass
from fx_passes.graph_ops import aten

_SHORT = 16
"""A column of a product with at most so many terms is written as a sum."""

_CONVERT = torch.ops.prims.convert_element_type.default
_CASTS = {_CONVERT, aten.clone.default}
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}

Taken = int | Node
"""What is taken of a dimension: one index, or a vector of them."""


class NarrowProducts(Pass):
    """Move selections in front of a batched product whose result nobody reads whole.

    AltUp of Gemma 3n predicts four streams of hidden states by a product of [H, 4] and [4, 4] a
    token. Keys and values need the first of them; in the layer with the last keys and values,
    `fast_prefill` leaves nobody but logits rows who need the others.

    Before::

        bmm = aten.bmm(h, c); permute = aten.permute(bmm, [2, 0, 1])
        add = aten.add(permute, x); clone = aten.clone(add)
        select = aten.select(clone, 0, 0); index = aten.index(clone, [None, indices])

    After::

        slice = aten.slice(c, 2, 0, 1); permute_1 = aten.permute(slice, [0, 2, 1])
        mul = aten.mul(h, permute_1); sum = aten.sum(mul, [2], True)
        permute_2 = aten.permute(sum, [2, 0, 1]); slice_1 = aten.slice(x, 0, 0, 1)
        add_1 = aten.add(permute_2, slice_1); clone_1 = aten.clone(add_1)
        select = aten.select(clone_1, 0, 0)
        index_1 = aten.index(h, [indices]); index_2 = aten.index(c, [indices])
        bmm_1 = aten.bmm(index_1, index_2); permute_3 = aten.permute(bmm_1, [2, 0, 1])
        index_3 = aten.index(x, [None, indices]); add_2 = aten.add(permute_3, index_3)
        index = aten.clone(add_2)

    One column of few terms is written as a sum, in float32 at least, as inside a product.

    Skipped when:
        - something reads the result other than by one index or one vector of indices;
        - not exactly one index is taken: rows alone are not worth a second product;
        - what is taken is not a part of the product, but of what it is broadcast to;
        - the strides of what is taken would be others.
    """

    name = "narrow_products"
    stage = "aten"

    def apply(self, graph: Graph) -> int:
        products = graph.find_nodes(op="call_function", target=aten.bmm.default)
        return sum(self._narrow(graph, product) for product in products)

    def _narrow(self, graph: Graph, product: Node) -> bool:
        between, ends = _reach(product)
        taken = {node: ends[node] for node in graph.nodes if node in ends}
        if len({found for found in taken.values() if isinstance(found[1], int)}) != 1:
            return False
        if not all(_is_part(_source(end), dim, between) for end, (dim, _) in taken.items()):
            self.skip(f"{product.name}: what is taken is no part of it")
            return False
        parts = {what: _Part(graph, between, what) for _, what in taken.values()}
        made = {end: parts[what].in_place_of(end, dim) for end, (dim, what) in taken.items()}
        same = all(_strides(end) == _strides(new) for end, new in made.items())
        if same:
            for end, new in made.items():
                end.replace_all_uses_with(new)
        else:
            self.skip(f"{product.name}: what is taken would have other strides")
        for node in taken if same else [n for part in parts.values() for n in reversed(part.nodes)]:
            graph.erase_node(node)
        return same


# -- who reads a product ---------------------------------------------------------------------------


def _reach(product: Node) -> tuple[set[Node], dict[Node, tuple[int, Taken]]]:
    """Nodes from a product to the selections of it, and those; none if something reads it whole."""
    between, waiting = {product}, [product]
    ends: dict[Node, tuple[int, Taken]] = {}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in between or user in ends:
                continue
            found = _selection(user) if user.args[:1] == (node,) else None
            if found is not None:
                ends[user] = found
            elif _is_passed(user):
                between.add(user)
                waiting.append(user)
            else:
                return between, {}
    return between, ends


def _selection(node: Node) -> tuple[int, Taken] | None:
    """The dimension that a node takes a part of, and what; None for other nodes."""
    if node.target is aten.select.int:
        shape, (_, dim, index) = _value(node.args[0]).shape, node.args
        size = shape[dim]  # type: ignore
        static = type(size) is int and size > 1 and type(index) is int
        return (int(dim) % len(shape), int(index) % size) if static else None  # type: ignore
    if node.target is aten.index_select.default:
        _, dim, indices = node.args
        return int(dim) % _value(node.args[0]).dim(), indices  # type: ignore
    if node.target is not aten.index.Tensor:
        return None
    found = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]  # type: ignore
    vector = len(found) == 1 and _value(found[0][1]).dim() == 1
    numbers = vector and _value(found[0][1]).dtype in (torch.int32, torch.int64)
    return found[0] if numbers else None


def _is_passed(node: Node) -> bool:
    """Whether a part of the node's result is the node's result of a part."""
    if node.target is aten.permute.default:
        return True
    if node.target in _RESHAPES:
        return _units(node) is not None
    plain = isinstance(node.meta.get("val"), torch.Tensor) and not any(
        isinstance(argument, list | tuple) for argument in node.args
    )
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return plain and (pointwise or node.target in _CASTS)


def _units(node: Node) -> tuple[list[int], list[int]] | None:
    """Dimensions of size 1 that a view takes away and puts in, if it does nothing else."""
    before, after = _value(node.args[0]).shape, _value(node).shape
    gone, new = _ones(before), _ones(after)
    kept = [str(size) for dim, size in enumerate(before) if dim not in gone]
    same = kept == [str(size) for dim, size in enumerate(after) if dim not in new]
    return (gone, new) if same else None


def _ones(shape: Sequence[Any]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if type(size) is int and size == 1]


def _dims(node: Node, dim: int) -> list[tuple[Node, int | None]]:
    """Where dimension `dim` of a node that is passed lies in its arguments; None: it is not there.

    Those of a product are another matter.
    """
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return [(_source(node), order[dim] % len(order))]
    if node.target in _RESHAPES:
        gone, new = _units(node) or ([], [])
        places = [d for d in range(_value(_source(node)).dim()) if d not in gone]
        kept = [d for d in range(_value(node).dim()) if d not in new]
        return [(_source(node), None if dim in new else places[kept.index(dim)])]
    behind = _value(node).dim() - dim
    tensors = [a for a in node.args if _is_tensor(a)]
    inner = [_value(a).dim() - behind for a in tensors]
    return [
        (a, d if d >= 0 and d not in _ones(_value(a).shape) else None)  # type: ignore
        for a, d in zip(tensors, inner, strict=True)
    ]


def _is_part(node: Node, dim: int, between: set[Node]) -> bool:
    """Whether taking of `dim` takes a part of the product, on all ways to it."""
    if node.target is aten.bmm.default:
        return True
    ways = [(a, d) for a, d in _dims(node, dim) if a in between]
    return all(d is not None and _is_part(a, d, between) for a, d in ways)


# -- what is taken of it ---------------------------------------------------------------------------


class _Part:
    """The nodes behind a product, computed for what is taken of one dimension."""

    def __init__(self, graph: Graph, between: set[Node], taken: Taken) -> None:
        self.graph = graph
        self.between, self.taken = between, taken
        self.nodes: list[Node] = []
        self._made: dict[tuple[Node, int], Node] = {}

    def in_place_of(self, end: Node, dim: int) -> Node:
        """What a selection gives, made in front of it."""
        with self.graph.inserting_before(end):
            new = self.of(_source(end), dim)
            return self._call(aten.select.int, new, dim, 0) if isinstance(self.taken, int) else new

    def of(self, node: Node, dim: int) -> Node:
        """`node` with what is taken in place of its dimension `dim`."""
        if (node, dim) not in self._made:
            make = self._recomputed if node in self.between else self._cut
            self._made[node, dim] = make(node, dim)
        return self._made[node, dim]

    def _cut(self, node: Node, dim: int) -> Node:
        if isinstance(self.taken, int):
            return self._call(aten.slice.Tensor, node, dim, self.taken, self.taken + 1)
        return self._call(aten.index.Tensor, node, [*[None] * dim, self.taken])

    def _recomputed(self, node: Node, dim: int) -> Node:
        if node.target is aten.bmm.default:
            return self._product(node, dim)
        parts = {a: a if d is None else self.of(a, d) for a, d in _dims(node, dim)}
        if node.target in _RESHAPES:  # its sizes are others now
            gone, new = _units(node) or ([], [])
            result = parts[_source(node)]
            result = self._call(aten.squeeze.dims, result, gone) if gone else result
            for one in new:
                result = self._call(aten.unsqueeze.default, result, one)
            return result
        arguments = [parts.get(a, a) if isinstance(a, Node) else a for a in node.args]
        return self._call(node.target, *arguments, **node.kwargs)

    def _product(self, node: Node, dim: int) -> Node:
        left, right = node.args
        left = left if dim == 2 else self.of(left, dim)  # type: ignore
        right = right if dim == 1 else self.of(right, dim)  # type: ignore
        terms = _value(left).shape[2]
        short = type(terms) is int and terms <= _SHORT and _value(left).dtype.is_floating_point
        if dim == 2 and isinstance(self.taken, int) and short:
            return self._column(left, right)
        return self._call(node.target, left, right)

    def _column(self, left: Any, right: Any) -> Node:
        """[B, M, K] times [B, K, 1] as a sum of K terms."""
        dtype = _value(left).dtype
        wide = dtype if dtype == torch.float64 else torch.float32
        factors = [left, self._call(aten.permute.default, right, [0, 2, 1])]
        if dtype != wide:
            factors = [self._call(_CONVERT, factor, wide) for factor in factors]
        total = self._call(aten.sum.dim_IntList, self._call(aten.mul.Tensor, *factors), [2], True)
        return total if dtype == wide else self._call(_CONVERT, total, dtype)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node with its value, where the graph stands."""
        node = self.graph.call_function(target, args, kwargs)
        self.nodes.append(node)
        fakes = [_value(a) for a in node.all_input_nodes if _is_tensor(a)]
        with fakes[0].fake_mode:
            values: Any = map_arg(node.args, _value), map_arg(node.kwargs, _value)
            node.meta["val"] = target(*values[0], **values[1])
        return node


def _strides(node: Node) -> list[str]:
    """Of the dimensions that have one; symbols as they are written."""
    value = _value(node)
    ones = _ones(value.shape)
    return [str(stride) for dim, stride in enumerate(value.stride()) if dim not in ones]


def _source(node: Node) -> Node:
    return node.args[0]  # type: ignore


def _value(node: Any) -> Any:
    return node.meta["val"]


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta.get("val"), torch.Tensor)
