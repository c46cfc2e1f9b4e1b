"""Write batched products of few terms as sums, which are fused with what stands around them."""

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_passes.analysis.graph_ops import PRODUCTS, VIEWS, aten
from fx_passes.analysis.sizes import hint
from fx_passes.analysis.values import value_of
from fx_passes.base import Pass

_SHORT = 4
"""Terms of a sum, and its rows or columns. AltUp has 4; where the limit lies best was not measured.

With many rows and many columns it is the result that takes the time, and a product writes it well:
[1024, 4] times [4, 1024] in bf16 took about 20 times longer as a sum, and [50000, 4] times [4, 4]
with nothing around it 5 times (a CPU, torch 2.13, 2026-11-21); on a GPU only AltUp was measured.
"""

_CONVERT = torch.ops.prims.convert_element_type.default

_COPIES = frozenset({_CONVERT, aten.expand.default, aten.clone.default})

_OWN = frozenset({"val", "tensor_meta", "eager_input_vals"})
"""What a node's meta says of its own value; the rest is that of the product."""


class ShortProducts(Pass):
    """Replace a batched product whose sums have at most four terms by those sums.

    AltUp of Gemma 3n predicts four streams of hidden states by a product of [H, 4] and [4, 4] a
    token. A library's kernel reads and writes all streams once more for it, which takes a fifth of
    a layer. Inductor computes a sum in the kernel that adds the streams.

    Before::

        T: int; h: f32[T, 8, 2]; c: f32[T, 2, 2]
        bmm = aten.bmm(h, c)
        return bmm

    After::

        slice_tensor = aten.slice.Tensor(h, 2, 0, 1); slice_tensor_1 = aten.slice.Tensor(c, 1, 0, 1)
        mul_tensor = aten.mul.Tensor(slice_tensor, slice_tensor_1)
        slice_tensor_2 = aten.slice.Tensor(h, 2, 1, 2)
        slice_tensor_3 = aten.slice.Tensor(c, 1, 1, 2)
        mul_tensor_1 = aten.mul.Tensor(slice_tensor_2, slice_tensor_3)
        add_tensor = aten.add.Tensor(mul_tensor, mul_tensor_1)
        clone_default = aten.clone(add_tensor, memory_format=torch.contiguous_format)
        return clone_default

    Sums are in float32 at least, as inside a product, and in the order of their terms. A sum of
    zeros may be -0, a product's is +0. Inductor rounds a sum to its dtype only where it writes it
    to memory. In float16 a sum may stay finite where a product would be infinite. The clone has the
    strides of a product; Inductor copies nothing for it.

    Skipped when:
        - the number of terms, rows or columns changes, the result is no floating point number, or
          it has more than four rows and more than four columns;
        - an operand is read more than four times, once a row or column, and nothing shows that it
          is in memory, as an input of the graph or a product is: it would be computed as often;
        - what reads the result has more elements, by the sizes of the first call: the sum would be
          computed for each;
        - the graph has `as_strided`, which might look at the memory of the product;
        - the graph has gradients, as nothing was measured of training; a region that is compiled
          by itself (`nested_compile_region`) does not show them.
    """

    name = "short_products"
    stage = "aten"
    needs_inference = True
    looks_for = "batched product of few terms"

    def apply(self, graph: Graph) -> int:
        if graph.find_nodes(op="call_function", target=aten.as_strided.default):
            self.skip("the graph has as_strided, which might look at the memory of a product")
            return 0
        found = graph.find_nodes(op="call_function", target=aten.bmm.default)
        short = [node for node in found if _is_short(node) and not _is_spread(node)]
        for product in short:
            with graph.inserting_before(product):
                product.replace_all_uses_with(_Sum(graph, product).node)
            graph.erase_node(product)
        return len(short)


def _is_short(product: Node) -> bool:
    """Whether terms, and rows or columns, are few, and no operand is computed more often."""
    nodes = [product, *product.all_input_nodes]
    if not all(isinstance(value_of(node), torch.Tensor) for node in nodes):
        return False
    left, right = cast("tuple[Node, Node]", product.args)
    terms, (_, rows, columns) = value_of(left).shape[2], value_of(product).shape
    if any(type(size) is not int for size in (terms, rows, columns)):
        return False
    few = 0 < terms <= _SHORT and min(rows, columns) <= _SHORT
    return (
        few
        and value_of(product).dtype.is_floating_point
        and (columns <= _SHORT or _is_in_memory(left))
        and (rows <= _SHORT or _is_in_memory(right))
    )


def _is_in_memory(node: Any) -> bool:
    """Whether an input or a product is read, as it is, copied or in another dtype."""
    while node.target in VIEWS or node.target in _COPIES:
        node = node.args[0]
    return node.op == "placeholder" or node.target in PRODUCTS


def _is_spread(product: Node) -> bool:
    """Whether what reads it, up to the next library kernels, has more elements."""
    most, behind, seen = _num_elements(product), [product], {product}
    while behind:
        for user in behind.pop().users:
            if user in seen or not _is_fused(user.target):
                continue
            if _num_elements(user) > most:
                return True
            seen.add(user)
            behind.append(user)
    return False


def _is_fused(target: Any) -> bool:
    """Whether Inductor may compute its arguments within it; library kernels read them."""
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    is_product = target in PRODUCTS or target is aten.bmm.default
    return target.namespace in ("aten", "prims") and not is_product


def _num_elements(node: Node) -> int:
    """By the sizes that were traced with, which guards nothing; 0 for what has none."""
    value = value_of(node)
    return hint(value.numel()) or 0 if isinstance(value, torch.Tensor) else 0


class _Sum:
    """[B, M, K] times [B, K, N] as K products of [B, M, 1] and [B, 1, N]."""

    def __init__(self, graph: Graph, product: Node) -> None:
        self.graph = graph
        self._origin = {key: what for key, what in product.meta.items() if key not in _OWN}
        dtype = value_of(product).dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        left, right = (self._converted(factor, wide) for factor in product.args)
        total: Node | None = None
        for k in range(value_of(left).shape[2]):
            columns = self._call(aten.slice.Tensor, left, 2, k, k + 1)
            rows = self._call(aten.slice.Tensor, right, 1, k, k + 1)
            term = self._call(aten.mul.Tensor, columns, rows)
            total = term if total is None else self._call(aten.add.Tensor, total, term)
        assert total is not None, "a product that is rewritten has terms"
        total = self._converted(total, dtype)
        self.node = self._call(aten.clone.default, total, memory_format=torch.contiguous_format)

    def _converted(self, node: Any, dtype: torch.dtype) -> Node:
        return node if value_of(node).dtype == dtype else self._call(_CONVERT, node, dtype)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node with its value, where the graph stands."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self._origin)
        with value_of(node.all_input_nodes[0]).fake_mode:
            node.meta["val"] = target(*map_arg(args, value_of), **kwargs)
        return node
