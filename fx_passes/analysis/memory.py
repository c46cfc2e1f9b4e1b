"""Which memory a node reads and which it writes: what keeps the order of in-place operations."""

from collections.abc import Sequence

import torch
from torch.fx import Node

from fx_passes.analysis.values import tensors_of, value_of

_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"})
"""Functions of `operator` that write to their first argument."""


def storage(x: torch.Tensor) -> int:
    """A key of x's memory; that of x itself where it has none, as in a vmap."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(x)


def touched_storages(nodes: Sequence[Node]) -> set[int]:
    """Storages (of the fake tensors) that the nodes' results and arguments live in."""
    values = [value_of(n) for node in nodes for n in (node, *node.all_input_nodes)]
    return {storage(x) for x in tensors_of(values)}


def mutated_storages(nodes: Sequence[Node]) -> set[int]:
    """Storages that the nodes write to in place."""
    written = [value_of(a) for node in nodes for a in mutated_arguments(node)]
    return {storage(x) for x in tensors_of(written)}


def mutated_arguments(node: Node) -> list[Node]:
    """Arguments that a node of the Dynamo graph writes to: by its schema, or by its name."""
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
        return [a for n in mutated_names(node.target) if isinstance(a := given.get(n), Node)]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    written = [node.args[0]] if in_place and node.args else []
    return [a for a in (*written, node.kwargs.get("out")) if isinstance(a, Node)]


def mutated_names(op: torch._ops.OpOverload) -> list[str]:
    """Names of the arguments that an operator's schema says it writes to."""
    return [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
