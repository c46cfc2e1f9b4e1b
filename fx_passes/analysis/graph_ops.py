"""Which operators are views, products or attention: the vocabulary that the passes share."""

import operator
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch.fx import Graph, Node

import attn_ops.ops  # noqa: F401  (it defines the operators that are named here)

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
    }
)
"""Operators of the functional graph whose result shares the storage of their first argument."""

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
"""Matrix products: their results are contiguous and written by a kernel of their own."""

ATTENTION = (
    torch.ops.attn_ops.attention.default,
    torch.ops.attn_ops.attention_with_lse.default,
    torch.ops.attn_ops.mla_attention.default,
    torch.ops.attn_ops.mla_attention_with_lse.default,
)
"""Rows of q attend by themselves; a reduced batch tells where they stand."""

WITH_LSE = frozenset(op for op in ATTENTION if len(op._schema.returns) == 2)
"""Attention that returns the log-sum-exp too."""

QUANTIZED_FORM = {
    torch.ops.attn_ops.attention.default: torch.ops.attn_ops.attention_quant.default,
    torch.ops.attn_ops.mla_attention.default: torch.ops.attn_ops.mla_attention_quant.default,
}
"""By attention, the operator whose output is quantized: values and scales."""

QUANTIZED = frozenset(QUANTIZED_FORM.values())


def operator_name(node: Node) -> str:
    """What a node calls, without its namespace and overload: `mm`, `linear`, `view`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def computed_from(node: Node, through: Callable[[Node], bool] | None = None) -> Iterator[Node]:
    """`node` and what it is computed from; `through` says behind which to look."""
    pending, seen = [node], {node}
    while pending:
        one = pending.pop()
        yield one
        if through is None or through(one):
            new = [source for source in one.all_input_nodes if source not in seen]
            seen.update(new)
            pending += new


def returned(node: Node) -> list[Node]:
    """What the functional graph returns of a tensor: itself, or views of it."""
    own = [node] if any(user.op == "output" for user in node.users) else []
    return own + [v for user in node.users if _shares_memory(user) for v in returned(user)]


def _shares_memory(node: Node) -> bool:
    """Whether it is a view of its first argument, of any kind, or a part of several views."""
    if node.target is operator.getitem:
        return _shares_memory(cast(Node, node.args[0]))
    op = node.target
    views = isinstance(op, torch._ops.OpOverload) and any(r.alias_info for r in op._schema.returns)
    return views or op in VIEWS


def switches_autocast(node: Node) -> bool:
    """Whether a node of the Dynamo graph changes in which dtypes those behind it compute."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in ("_enter_autocast", "_exit_autocast")


def has_own_code(graph: Graph) -> bool:
    """Whether an operator of the Dynamo graph has a graph of its own."""
    owner = graph.owning_module
    modules = dict(owner.named_modules()) if owner is not None else {}
    return any(node.target in modules for node in graph.find_nodes(op="get_attr"))


def vmapped_nodes(graph: Graph) -> set[Node]:
    """Those of a Dynamo graph's vmaps, which work by the level that others begin and end."""
    found, depth = set(), 0
    for node in graph.nodes:
        name = operator_name(node)
        depth += name.endswith("_increment_nesting")
        if depth:
            found.add(node)
        depth -= name.endswith("_decrement_nesting")
    return found
