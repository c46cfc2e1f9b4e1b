"""Which module a node was traced in, and which layer that is: "model.layers.3" of its path."""

import re
from typing import Any

from torch.fx import Node

from fx_passes.analysis.values import noted

_LAYER = re.compile(r"^(.*?\.\d+)(?:\.(.*))?$")
"""A module path up to its first number, as in Transformers and torchvision, and the rest."""

_STACK = "nn_module_stack"
"""Where Dynamo notes the modules of a node, the innermost last."""

_MODEL = re.compile(r"^L\[['\"](?:self['\"]\]|args['\"]\]\[\d+\])")
"""Dynamo's name of the model itself: in its forward, or in a decorator that takes `*args`."""


def module_stack(node: Node) -> Any:
    """The modules whose code made a node, the innermost last, as Dynamo notes them; or None."""
    return noted(node, _STACK)


def layer_path(node: Node) -> str | None:
    """The path of the layer that the node belongs to, None outside layers."""
    stack = module_stack(node)
    if not stack:
        return None
    found = _LAYER.match(f".{module_path(list(stack.values())[-1][0])}")
    return found.group(1)[1:] if found else None


def module_path(name: str) -> str:
    """The path of a module of the model that Dynamo names `L['self'].layers[3]`: `layers.3`."""
    path = re.sub(r"\[(['\"]?)(\w+)\1\]", r".\2", _MODEL.sub("", name))
    return path.removeprefix(".")


def copy_path(node: Node, source: Node) -> None:
    """Let the node belong to the module that `source` belongs to, or to none."""
    drop_path(node)
    if _STACK in source.meta:
        node.meta[_STACK] = source.meta[_STACK]


def drop_path(node: Node) -> None:
    """Let the node belong to no module."""
    node.meta.pop(_STACK, None)
