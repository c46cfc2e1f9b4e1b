"""Whether a graph is trained: whether somebody wants gradients of it."""

import torch
from torch.fx import Graph

from fx_passes.analysis.values import tensors_of, value_of


def why_trained(graph: Graph, stage: str) -> str | None:
    """What shows that gradients are wanted, None if nothing does.

    In the graph of stage `dynamo` an input requires grad. AOTAutograd has traced the gradients into
    that of stage `aten`, and calls their inputs tangents. A region that is compiled by itself
    (`nested_compile_region`) does not show them.
    """
    inputs = graph.find_nodes(op="placeholder")
    if stage == "aten":
        traced = any("tangents" in str(node.target) for node in inputs)
        return "training: the graph has gradients" if traced else None
    asked = torch.is_grad_enabled() and any(
        x.requires_grad for node in inputs for x in tensors_of(value_of(node))
    )
    return "training: an input requires grad" if asked else None
