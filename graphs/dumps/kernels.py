"""The calls of Inductor's output code: kernel, source, ATen nodes of its comments, and bytes.

The code is read as text; nothing of it runs. A call is a dict:

    "name": of the kernel; "extern_kernels.mm", "torch.ops.x.y.default" are not of Inductor.
    "call": the line of the call, at most 400 characters.
    "source": of the kernel, with the comments above it; empty for others.
    "aten", "model_nodes": operators and nodes of Inductor's comment.
    "graph_nodes": nodes of the graph in `final/` that the comment lists; empty for C++ kernels.
    "group": as in a timeline, see `graphs.dumps.groups`: "products", "attention", ...
    "bytes_read", "bytes_written": {"": bytes, "T": bytes a token, "s9": bytes for each s9}, a sum;
        null where the size of an argument is not known, or no such sum. "T" is the number of
        tokens of the step; other names are Inductor's symbols.
    "detail": "[T, 4096] x [4096, 6144]" of a product, else "".
"""

import re
from typing import Any

_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
_CALL = re.compile(r"^ +(?:\w+ = )?(?P<name>(?:extern_kernels|torch\.ops)[\w.]+|\w+?(?:\.run)?)\(")
_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_GRAPH_NODE = re.compile(r"^#\s+%(\w+) :", re.MULTILINE)


def kernels(code: str) -> list[dict[str, Any]]:
    """Calls in the order in which the graph makes them."""
    sources = _sources(code)
    found, comment = [], ("", "")
    for line in code.splitlines():
        if match := _NODES.search(line):
            comment = match.groups()
            continue
        call = _CALL.match(line)
        name = call["name"].removesuffix(".run") if call else ""
        outside = name.startswith(("extern_kernels.", "torch.ops."))
        if outside or name in sources:
            found.append(_kernel(name, line.strip(), sources.get(name, ""), comment, outside))
            comment = ("", "")
    return found


def _kernel(
    name: str, line: str, source: str, comment: tuple[str, ...], outside: bool
) -> dict[str, Any]:
    own = _NODES.search(source)
    model, aten = own.groups() if own else comment if outside else ("", "")
    return {
        "name": name,
        "call": line[:400],
        "source": source,
        "aten": [one for one in aten.split(", ") if one],
        "model_nodes": [one for one in model.split(", ") if one],
        "graph_nodes": list(dict.fromkeys(_GRAPH_NODE.findall(source))),
    }


def _sources(code: str) -> dict[str, str]:
    """By kernel, its definition and the comments above it."""
    found = {}
    for match in _DEFINITION.finditer(code):
        end = re.compile(r"^('''|\"\"\").*\)$", re.MULTILINE).search(code, match.end())
        above = code.rfind("\n\n\n", 0, match.start()) + 1
        found[match[1]] = code[above : end.end() if end else match.end()].strip()
    return found
