"""Which memory a node reads and which it writes: what keeps the order of in-place operations."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from fx_passes.analysis.values import tensors_of, value_of

_IN_PLACE = frozenset((
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul",
    "ior", "iand", "ixor", "ilshift", "irshift", "setitem",
))  # fmt: skip
"""Functions of `operator` that write to their first argument."""

_WHEN_TOLD = {
    "inplace": ("input",),
    "training": ("running_mean", "running_var"),
    "use_input_stats": ("running_mean", "running_var"),
    "max_norm": ("weight",),
}
"""Arguments of torch.nn.functional that make a function write, and to which others."""


def storage(x: torch.Tensor) -> int:
    """A key of x's memory; that of x itself where it has none, as in a vmap."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(x)


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether there may be memory that two tensors both show: by their first and last elements."""
    if storage(a) != storage(b):
        return False
    places = [(*x.shape, *x.stride(), x.storage_offset(), x.element_size()) for x in (a, b)]
    if not all(isinstance(number, int) for place in places for number in place):
        return True
    (begin, end), (other, its_end) = map(_bytes, (a, b))
    return bool(begin < its_end and other < end)


def _bytes(x: torch.Tensor) -> tuple[Any, Any]:
    """Where its elements begin in its storage, and where they end."""
    begin = x.storage_offset()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    width = x.element_size()
    return begin * width, (begin + last + 1) * width if x.numel() else begin * width


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
    target, written = node.target, []
    if isinstance(target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)
    if isinstance(target, torch._ops.OpOverloadPacket):  # any of its overloads may be meant
        overloads = [getattr(target, name) for name in target.overloads()]
    else:
        overloads = [target] if isinstance(target, torch._ops.OpOverload) else []
    for op in overloads:
        names = (a.name for a in op._schema.arguments)
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        written += [given.get(name) for name in mutated_names(op)]
    if not overloads:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
            written += node.args[:1]
        written += [node.kwargs.get("out"), *_written_when_told(node)]
    return [a for a in dict.fromkeys(tree_leaves(written)) if isinstance(a, Node)]


def _written_when_told(node: Node) -> list[Any]:
    """What a function of torch.nn.functional writes to because an argument says so."""
    if getattr(node.target, "__module__", None) != functional.__name__:
        return []
    signature = _signature(node.target)
    if signature is None or not signature.parameters.keys() & _WHEN_TOLD.keys():
        return []
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    told = (names for flag, names in _WHEN_TOLD.items() if bound.arguments.get(flag))
    return [bound.arguments.get(name) for names in told for name in names]


# Cached: the functions of torch.nn.functional, for all graphs.
@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # of C++
        return None


def mutated_names(op: torch._ops.OpOverload) -> list[str]:
    """Names of the arguments that an operator's schema says it writes to."""
    return [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
