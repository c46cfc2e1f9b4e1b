"""The value that a node was traced with: a fake tensor, a number, or a tuple of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves


def value_of(node: Node) -> Any:
    """The value of a node of either stage, None if none is noted.

    Dynamo notes it as `example_value`, AOTAutograd as `val`.
    """
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def noted(node: Node, what: str) -> Any:
    """What Dynamo or AOTAutograd noted of a node under a name; None if nothing."""
    return node.meta.get(what)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value."""
    return (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
