"""Compute of a batched product only the part that others take of it."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.base import Pass
from fx_passes.graph_ops import VIEWS, aten

_SHORT = 16
"""Terms of a sum in a product that is looked at. AltUp has 4; where the limit lies best was not
measured."""

_FEW = 64
"""Nodes between a product and what is taken of it; behind more it is not looked for."""

_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "seq_nr")
"""What errors and profiles tell of a node."""

_CONVERT = torch.ops.prims.convert_element_type.default
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
    """Move selections in front of a batched product of short sums that nobody reads whole.

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

    One column is written as a sum, in float32 at least, as inside a product.

    Skipped when:
        - sums of the product have more than 16 terms, or are no floating point numbers;
        - something reads the result other than by one index and one vector of indices;
        - no single index is taken, or several of them: not much would be saved;
        - a dimension is taken of that the product does not have, only what it is broadcast to;
        - what is taken leaves the graph, has strides of its own, or is read by `as_strided`;
        - a policy of activation checkpointing names the product.
    """

    name = "narrow_products"
    stage = "aten"

    def apply(self, graph: Graph) -> int:
        """Again while something is found: a part of a product may be read in part, too."""
        matches, more = 0, 1
        while more:
            self.skipped = []
            products = graph.find_nodes(op="call_function", target=aten.bmm.default)
            more = sum(self._narrow(graph, product) for product in products if _is_short(product))
            matches += more
        return matches

    def _narrow(self, graph: Graph, product: Node) -> bool:
        between, ends, reader = _reach(product)
        if not any(isinstance(what, int) for _, what in ends.values()):
            return False
        if reason := _why_not(between, ends, reader):
            self.skip(f"{product.name} is computed whole: {reason}")
            return False
        ordered = [node for node in graph.nodes if node in ends]
        parts = {what: _Part(graph, between, what) for _, what in ends.values()}
        made = {end: parts[ends[end][1]].in_place_of(end, ends[end][0]) for end in ordered}
        same = all(_strides(end) == _strides(new) for end, new in made.items())
        if same:
            for end, new in made.items():
                end.replace_all_uses_with(new)
        else:
            self.skip(f"{product.name} is computed whole: its part would have other strides")
        for node in made if same else [n for part in parts.values() for n in reversed(part.nodes)]:
            graph.erase_node(node)
        return same


def _is_short(product: Node) -> bool:
    value = product.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(_is_tensor(a) for a in product.args):
        return False
    terms = _value(product.args[0]).shape[2]
    return value.dtype.is_floating_point and type(terms) is int and terms <= _SHORT


# -- who reads a product ---------------------------------------------------------------------------


Ends = dict[Node, tuple[int, Taken]]
"""Selections, with the dimension and what is taken of it."""


def _reach(product: Node) -> tuple[set[Node], Ends, Node | None]:
    """Nodes from a product to selections of it, those, and a node that reads it in another way."""
    between, waiting, reader = {product}, [product], None
    ends: Ends = {}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            found = _selection(user) if user.args[:1] == (node,) else None
            if found is not None and found[1] is not node:
                ends[user] = found
            elif user in ends or not _is_passed(user):
                reader = user
            elif user not in between:
                between.add(user)
                waiting.append(user)
    return between, ends, reader


def _why_not(between: set[Node], ends: Ends, reader: Node | None) -> str:
    """Why a product that is selected from is not narrowed; nothing if it can be."""
    if reader is not None:
        return f"{reader.name} reads all of it"
    if len(between) > _FEW:
        return f"more than {_FEW} operators stand between it and what is taken"
    numbers = {found for found in ends.values() if isinstance(found[1], int)}
    vectors = {found for found in ends.values() if isinstance(found[1], Node)}
    if len(numbers) > 1 or len(vectors) > 1:
        return "several parts of it are taken"
    if any(_is_longer(end, ends[end]) for end in ends):
        return "more rows are taken than there are"
    if not all(_is_part(_source(end), dim, between) for end, (dim, _) in ends.items()):
        return "a dimension is taken of that it is broadcast to"
    if any("recompute" in node.meta for node in between):
        return "activation checkpointing has a policy for it"
    escape = next((name for end in ends if (name := _escapes(end))), None)
    return f"what is taken is read by {escape}" if escape else ""


def _is_longer(end: Node, found: tuple[int, Taken]) -> bool:
    """Whether a vector has more entries than the dimension, as far as both are known."""
    dim, what = found
    if isinstance(what, int):
        return False
    size, count = _value(end.args[0]).shape[dim], _value(what).shape[0]
    return type(size) is int and (type(count) is not int or count > size)


def _escapes(end: Node) -> str | None:
    """An output, or an operator that looks at the memory behind views of a selection."""
    seen, waiting = {end}, [end]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or user.target is aten.as_strided.default:
                return user.name
            if user.target in VIEWS and user not in seen:
                seen.add(user)
                waiting.append(user)
    return None


def _selection(node: Node) -> tuple[int, Taken] | None:
    """The dimension that a node takes a part of, and what; None for other nodes."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.select.int and _is_tensor(args[0]):
        shape, (dim, index) = _value(args[0]).shape, args[1:]
        size = shape[dim]
        static = type(size) is int and size > 1 and type(index) is int
        return (dim % len(shape), index % size) if static else None
    if node.target is aten.index_select.default and _is_tensor(args[0]):
        return args[1] % _value(args[0]).dim(), args[2]
    if node.target is not aten.index.Tensor or not _is_tensor(args[0]):
        return None
    found = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    vector = len(found) == 1 and _value(found[0][1]).dim() == 1
    numbers = vector and _value(found[0][1]).dtype in (torch.int32, torch.int64)
    return found[0] if numbers else None


def _is_passed(node: Node) -> bool:
    """Whether a part of the node's result is the node's result of a part."""
    values = [node.meta.get("val"), *(a.meta.get("val") for a in node.all_input_nodes)]
    if not isinstance(values[0], torch.Tensor) or any(v is None for v in values):
        return False
    if node.target is aten.permute.default:
        return True
    if node.target in _RESHAPES:
        return _units(node) is not None
    nested = any(isinstance(a, list | tuple) for a in node.args)
    named = any(isinstance(a, Node) for a in node.kwargs.values())
    tags = getattr(node.target, "tags", ())
    plain = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return (plain or node.target is _CONVERT) and not (nested or named)


def _units(node: Node) -> tuple[list[int], list[int]] | None:
    """Dimensions of size 1 before and after a view, if it does no more than change those."""
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
    tensors = [a for a in node.args if isinstance(a, Node) and _is_tensor(a)]
    inner = [_value(a).dim() - behind for a in tensors]
    return [
        (a, d if d >= 0 and d not in _ones(_value(a).shape) else None)
        for a, d in zip(tensors, inner, strict=True)
    ]


def _is_part(node: Node, dim: int, between: set[Node]) -> bool:
    """Whether taking of `dim` takes a part of the product, on all ways to it."""
    seen, waiting = set(), [(node, dim)]
    while waiting:
        one = waiting.pop()
        if one in seen or one[0].target is aten.bmm.default:
            continue
        seen.add(one)
        ways = [(a, d) for a, d in _dims(*one) if a in between]
        if not ways or any(d is None for _, d in ways):
            return False
        waiting += [(a, d) for a, d in ways if d is not None]
    return True


# -- what is taken of it ---------------------------------------------------------------------------


class _Part:
    """The nodes behind a product, computed for what is taken of one dimension."""

    def __init__(self, graph: Graph, between: set[Node], taken: Taken) -> None:
        self.graph = graph
        self.between, self.taken = between, taken
        self.nodes: list[Node] = []
        self._origin: dict[str, Any] = {}
        self._made: dict[tuple[Node, int], Node] = {}

    def in_place_of(self, end: Node, dim: int) -> Node:
        """What a selection gives, made in front of it."""
        self._origin = {key: end.meta[key] for key in _ORIGIN if key in end.meta}
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
        left, right = cast(tuple[Node, Node], node.args)
        left = left if dim == 2 else self.of(left, dim)
        right = right if dim == 1 else self.of(right, dim)
        if dim == 2 and isinstance(self.taken, int):
            return self._column(left, right)
        return self._call(node.target, left, right)

    def _column(self, left: Node, right: Node) -> Node:
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
        node.meta.update(self._origin)
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
    return cast(Node, node.args[0])


def _value(node: Any) -> Any:
    return node.meta["val"]


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta.get("val"), torch.Tensor)
