"""The nodes of an FX graph as plain data, for the page of a dump.

A node is a dict:

    "name", "op", "target": "mm_3", "mm", "aten.mm.default".
    "inputs": names of the nodes it reads.
    "args", "keywords": its arguments as text, and those keywords that are numbers or strings.
    "type": "float32[1, s27, 64]".
    "bytes": of its tensors, [fixed, more for each token]; null: it is no tensor.
    "module", "line": "model.layers.0.mlp LlamaMLP", and the source line that made it.
    "by": the pass that made it; null: the model's own code.
"""

from typing import Any

from torch.fx import Graph, Node

from fx_passes.analysis.graph_ops import operator_name
from fx_passes.analysis.layer_paths import module_path, module_stack
from fx_passes.analysis.sizes import expression
from fx_passes.analysis.values import noted, tensors_of, value_of

_LONGEST = 300
"""Characters of an argument list or of a line that are kept."""


def nodes_of(graph: Graph, made: dict[str, str]) -> list[dict[str, Any]]:
    """Describe every node, in order.

    Args:
        made: by node name, the pass that made it; other nodes come from the model's code.
    """
    return [_node(node, made) for node in graph.nodes]


def _node(node: Node, made: dict[str, str]) -> dict[str, Any]:
    origins = [source.name for source in noted(node, "from_node") or ()]
    value = value_of(node)
    plain = {k: v for k, v in node.kwargs.items() if isinstance(v, int | float | str)}
    return {
        "name": node.name,
        "op": node.op if node.op in ("placeholder", "output") else _operator(node),
        "target": str(node.target),
        "inputs": [source.name for source in node.all_input_nodes],
        "args": str((*node.args, *node.kwargs.items()))[:_LONGEST],
        "keywords": plain,
        "type": _type(value),
        "bytes": _bytes(value),
        "module": _module(module_stack(node)),
        "line": _line(noted(node, "stack_trace")),
        "by": next((made[name] for name in (node.name, *origins) if name in made), None),
    }


def _operator(node: Node) -> str:
    return str(node.target) if node.op in ("call_module", "get_attr") else operator_name(node)


def _type(value: Any) -> str:
    """`float32[1, s27, 64]`."""
    if isinstance(value, list | tuple):
        return ", ".join(_type(one) for one in value)[:_LONGEST]
    if not hasattr(value, "shape"):
        return "" if value is None else type(value).__name__
    shape = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _bytes(value: Any) -> list[int] | None:
    """Bytes of a value's tensors: fixed ones, and those for each token.

    In a decode step every symbolic size is the number of tokens.
    """
    tensors = list(tensors_of(value))
    if not tensors:
        return None
    at = []
    for symbol in (0, 1):
        sizes = (expression(x.numel()) * x.dtype.itemsize for x in tensors)
        at.append(sum(int(size.subs(dict.fromkeys(size.free_symbols, symbol))) for size in sizes))
    return [at[0], at[1] - at[0]]


def _module(stack: dict[str, Any] | None) -> str:
    """`model.layers.0.self_attn.q_proj Linear`, the innermost module."""
    if not stack:
        return ""
    path, kind = list(stack.values())[-1][:2]
    name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    return f"{module_path(str(path))} {name}"


def _line(trace: str | None) -> str:
    """`modeling_llama.py:65 in forward: hidden_states = ...`, the innermost frame."""
    lines = [line.strip() for line in (trace or "").splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if not frames:
        return ""
    where, code = lines[frames[-1]], "".join(lines[frames[-1] + 1 : frames[-1] + 2])
    path, _, rest = where.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(", in ")
    short = "/".join(path.split("/")[-2:])
    return f"{short}:{number} in {function}: {code}"[:_LONGEST]
