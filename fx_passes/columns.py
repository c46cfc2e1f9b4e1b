"""Let go of the columns of a value that all rows were computed for and logits rows alone read."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

_LEAST = 0.25
"""A copy of what stays is made if at least this part goes."""


def keep_read_columns(graph: Graph, source: Node, rows: Node) -> set[Node]:
    """Copy what is still read of `source`, whose rows have been gathered, so that it can be freed.

    Gemma 3n and Gemma 4 compute the inputs of all layers at the start, [T, layers, D], and every
    layer takes its own. Those of the layers that see logits rows only would be kept, for all rows,
    until the first of these::

        v = ...; first = v[:, 0]; second = v[:, 1]; rows = index_select(v, 0, indices)

    becomes::

        v = ...; rows = index_select(v, 0, indices); read = clone(v[:, 0:2])
        first = read[:, 0]; second = read[:, 1]

    Args:
        graph: Dynamo's graph; it is rewritten.
        source: a value that nothing writes to.
        rows: its gathered rows; they are moved behind it.

    Returns:
        The nodes whose values have other sizes or strides now; none if there is nothing to gain:
        something reads all columns, most are read, or by one node alone.
    """
    users = [user for user in source.users if user is not rows]
    taken = [_taken(user) for user in users]
    found = [one for one in taken if one is not None]
    if source.op == "placeholder" or len(found) < max(2, len(taken)):  # one reader frees it itself
        return set()
    dims, places = {dim for dim, _ in found}, [place for _, place in found]
    (dim, *others), low, high = dims, min(places), max(places) + 1
    size = source.meta["example_value"].shape[dim]
    if others or type(size) is not int or high - low > (1 - _LEAST) * size:
        return set()
    source.append(rows)
    with graph.inserting_after(rows):
        part = graph.call_function(operator.getitem, (source, _index(dim, slice(low, high))))
    with graph.inserting_after(part):
        how: dict[str, Any] = {"memory_format": torch.contiguous_format}
        read = graph.call_function(torch.clone, (part,), how)
    for node in (rows, part, read):  # they belong where the value does
        node.meta.pop("nn_module_stack", None)
        if "nn_module_stack" in source.meta:
            node.meta["nn_module_stack"] = source.meta["nn_module_stack"]
    for user, place in zip(users, places, strict=True):
        user.args = (read, _index(dim, place - low))
    return {part, read, *users}


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
    tensor = isinstance(value, Node) and isinstance(value.meta.get("example_value"), torch.Tensor)
    if not tensor or len(numbers) != 1 or len(full) != len(index) - 1:
        return None
    dim, place = numbers[0]
    size = value.meta["example_value"].shape[dim]  # type: ignore
    return (dim, place % size) if type(size) is int else None
