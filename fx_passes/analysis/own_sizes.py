"""Sizes that equal layers share, of which each must have its own to be cut out."""

import torch
from torch.fx import Graph, Node

from fx_passes.analysis.layer_paths import copy_path, layer_path
from fx_passes.analysis.values import value_of


def with_own_sizes(graph: Graph) -> list[tuple[Node, Node]]:
    """Let each layer compute the sizes that Dynamo computes in one of them; copies and originals.

    Only sizes of other sizes, such as the number of routed rows: 8 times that of the tokens.
    """
    copies = []
    for node in list(graph.nodes):
        path = None if node.op == "placeholder" else layer_path(node)
        if path is None or not _is_size(node) or not all(map(_is_size, node.all_input_nodes)):
            continue
        others: dict[str | None, list[Node]] = {}
        for user in node.users:
            others.setdefault(layer_path(user), []).append(user)
        others.pop(path, None)
        for users in others.values():
            with graph.inserting_before(min(users)):
                copied = graph.node_copy(node)
            copied.meta = dict(node.meta)
            copy_path(copied, users[0])
            for user in users:
                user.replace_input_with(node, copied)
            copies.append((copied, node))
    return copies


def _is_size(node: Node) -> bool:
    return isinstance(value_of(node), torch.SymInt)
