"""The nodes of a graph as plain data: what the page of a dump draws."""

from typing import Any

from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import operator_name
from fx_passes.analysis.layer_paths import module_stack
from fx_passes.analysis.values import noted

_LONGEST = 300
"""Characters of an argument list or of a line that are kept."""


def nodes_of(graph: Graph, made: dict[str, str]) -> list[dict[str, Any]]:
    """Every node in order: name, operator, inputs, type, module, source line and who made it.

    Args:
        made: by node name, the pass that made it; other nodes come from the model's code.
    """
    return [_node(node, made) for node in graph.nodes]


def _node(node: Node, made: dict[str, str]) -> dict[str, Any]:
    origins = [source.name for source in noted(node, "from_node") or ()]
    by = next((made[name] for name in (node.name, *origins) if name in made), None)
    return {
        "name": node.name,
        "op": node.op if node.op in ("placeholder", "output") else operator_name(node),
        "target": str(node.target),
        "inputs": [source.name for source in node.all_input_nodes],
        "args": str((*node.args, *node.kwargs.items()))[:_LONGEST],
        "type": _type(noted(node, "val")),
        "module": _module(module_stack(node)),
        "line": _line(noted(node, "stack_trace")),
        "by": by,
    }


def _type(value: Any) -> str:
    """`float32[1, s27, 64]`."""
    if isinstance(value, list | tuple):
        return ", ".join(_type(one) for one in value)[:_LONGEST]
    if not hasattr(value, "shape"):
        return "" if value is None else type(value).__name__
    shape = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _module(stack: dict[str, Any] | None) -> str:
    """`model.layers.0.self_attn.q_proj Linear`, of the innermost module."""
    if not stack:
        return ""
    path, kind = list(stack.values())[-1][:2]
    name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    return f"{str(path).removeprefix(_SELF)} {name}"


_SELF = "L['self']."


def _line(trace: str | None) -> str:
    """`modeling_llama.py:65 in forward: hidden_states = ...`, of the innermost frame."""
    lines = [line.strip() for line in (trace or "").splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if not frames:
        return ""
    where, code = lines[frames[-1]], "".join(lines[frames[-1] + 1 : frames[-1] + 2])
    path, _, rest = where.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(", in ")
    short = "/".join(path.split("/")[-2:])
    return f"{short}:{number} in {function}: {code}"[:_LONGEST]
