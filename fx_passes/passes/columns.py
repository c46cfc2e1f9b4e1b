"""Free the columns of a value that only logits rows read, though all rows were computed."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.fake_run import run_node
from fx_passes.analysis.layer_paths import copy_path
from fx_passes.analysis.memory import storage
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import tensors_of, value_of

_LEAST = 0.25
"""A copy of what stays is made if at least this part goes. A choice, not a measurement."""


def keep_read_columns(graph: Graph, source: Node, rows: Node) -> bool:
    """Copy what is still read of `source`, whose rows have been gathered, so that it can be freed.

    Gemma 3n and Gemma 4 compute the inputs of all layers at the start, [T, layers, D], and every
    layer takes one column. Columns of layers that see logits rows only would be kept, for all rows,
    until the first of these layers runs. So this::

        v = ...; first = v[:, 0]; second = v[:, 1]; rows = index_select(v, 0, indices)

    becomes::

        v = ...; rows = index_select(v, 0, indices); read = clone(v[:, 0:2])
        first = read[:, 0]; second = read[:, 1]

    Run it inside `fake_execution`. Returns whether it was done. It is not done where

    - there is nothing to gain: something reads all columns, most are read, or one node alone reads;
    - the value is a view, or its memory is not in the order of its dimensions;
    - a user of a column makes no new tensor of it, or one in another layout than before.

    Args:
        graph: Dynamo's graph; it is rewritten.
        source: a value that nothing writes to.
        rows: its gathered rows; they are moved behind it.
    """
    users = [user for user in source.users if user is not rows]
    taken = [_taken(user) for user in users]
    found = [one for one in taken if one is not None]
    if len(found) < max(2, len(taken)) or not _owns_memory(graph, source):
        return False
    dims, places = {dim for dim, _ in found}, [place for _, place in found]
    (dim, *others), low, high = dims, min(places), max(places) + 1
    value = value_of(source)
    if others or high - low > (1 - _LEAST) * value.shape[dim]:
        return False
    copy = value[_index(dim, slice(low, high))].clone(memory_format=torch.contiguous_format)
    new = {user: copy[_index(dim, place - low)] for user, place in zip(users, places, strict=True)}
    if not all(_is_plain(reader, user, new[user]) for user in users for reader in user.users):
        return False
    source.append(rows)
    with graph.inserting_after(rows):
        part = graph.call_function(operator.getitem, (source, _index(dim, slice(low, high))))
    with graph.inserting_after(part):
        how: dict[str, Any] = {"memory_format": torch.contiguous_format}
        read = graph.call_function(torch.clone, (part,), how)
    part.meta["example_value"] = value[_index(dim, slice(low, high))]
    read.meta["example_value"] = copy
    for node in (rows, part, read):  # they belong where the value does
        copy_path(node, source)
    for user, place in zip(users, places, strict=True):
        user.args = (read, _index(dim, place - low))
        user.meta["example_value"] = new[user]
    return True


def _owns_memory(graph: Graph, source: Node) -> bool:
    """Whether a value is an operator's, no view of an input, in the order of its dimensions."""
    value = value_of(source)
    inputs = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    theirs = {storage(x) for n in inputs for x in tensors_of(value_of(n))}
    strides, expected = [], 1
    for size in reversed(value.shape):
        strides.append(expected)
        expected = expected * size
    pairs = zip(value.shape, value.stride(), reversed(strides), strict=True)
    dense = all(
        (type(size) is int and size == 1) or expression(stride) == expression(wanted)
        for size, stride, wanted in pairs
    )
    return storage(value) not in theirs and dense


def _is_plain(reader: Node, user: Node, value: torch.Tensor) -> bool:
    """Whether `reader` computes something new of `user`, in one layout, if that becomes `value`."""
    values = {a: value_of(a) for a in reader.all_input_nodes} | {user: value}
    if reader.op not in ("call_function", "call_method"):
        return False
    try:
        result = run_node(reader, values)
    except Exception:  # for example: a later node reshapes the value in place
        return False
    old, new = list(tensors_of(value_of(reader))), list(tensors_of(result))
    same = [_layout(x) for x in old] == [_layout(x) for x in new]
    return bool(new) and same and storage(value) not in {storage(x) for x in new}


def _layout(x: torch.Tensor) -> tuple[str, str]:
    """Sizes and strides, with symbols by name."""
    return str(tuple(x.shape)), str(x.stride())


def _index(dim: int, what: int | slice) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, what)


def _taken(node: Node) -> tuple[int, int] | None:
    """The dimension and the place of `x[:, ..., place, :, ...]`, None for other nodes."""
    if node.target is not operator.getitem:
        return None
    value, index = node.args
    index = index if isinstance(index, tuple) else (index,)
    numbers = [(dim, place) for dim, place in enumerate(index) if type(place) is int]
    full = [place for place in index if place == slice(None)]
    tensor = isinstance(value, Node) and isinstance(value_of(value), torch.Tensor)
    if not tensor or len(numbers) != 1 or len(full) != len(index) - 1:
        return None
    dim, place = numbers[0]
    size = value_of(value).shape[dim]  # type: ignore
    return (dim, place % size) if type(size) is int else None
