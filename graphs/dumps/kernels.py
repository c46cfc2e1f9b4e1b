"""The calls of Inductor's output code: kernel, source, ATen nodes of its comments, and bytes.

The code is read as text; nothing of it runs. A call is a dict:

    "name": of the kernel; "extern_kernels.mm", "torch.ops.x.y.default" are not of Inductor.
    "call": the line of the call, at most 400 characters.
    "source": of the kernel, with the comments above it; empty for others.
    "aten", "model_nodes": operators and nodes of Inductor's comment.
    "graph_nodes": nodes of the graph in `final/` that the comment lists; empty for C++ kernels.
    "group": as in a timeline, see `graphs.dumps.output_code.groups`: "products", "attention", ...
    "bytes_read", "bytes_written": {"": bytes, "T": bytes a token, "s9": bytes for each s9}, a sum;
        null where the size of an argument is not known, or no such sum. "T" is the number of
        tokens of the step; other names are Inductor's symbols.
    "detail": "[T, 4096] x [4096, 6144]" of a product, else "".
    "parts": of several products in one call, the last three of each; else empty.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from graphs.dumps.output_code.buffers import Buffers
from graphs.dumps.output_code.groups import KV_WRITE, PRODUCTS, group_of
from graphs.dumps.output_code.moved import Moved, moved_by_kernel, moved_by_product

_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
_CALL = re.compile(r"^ +(?:\w+ = )?(?P<name>(?:extern_kernels|torch\.ops)[\w.]+|\w+?(?:\.run)?)\(")
_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_GRAPH_NODE = re.compile(r"^#\s+%(\w+) :", re.MULTILINE)
_TOKENS = re.compile(  # torch 2.15 asserts several at once
    r"assert_size_stride(?:\(\w+, |_grouped\(\(.*?\), \(.*?)\(1, (s\d+)\)(?:, |\))"
)
_BEGIN = "async_compile.wait(globals())"


def kernels_of(codes: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Calls of every output code of a model; the number of tokens is "T" in all of them."""
    found = (_TOKENS.search(code) for code in codes)
    tokens = next((match[1] for match in found if match), "")
    return [kernels(code, tokens) for code in codes]


def kernels(code: str, tokens: str = "") -> list[dict[str, Any]]:
    """Calls in the order in which the graph makes them.

    Args:
        tokens: Inductor's symbol for the number of tokens; empty: the code is searched for it.
    """
    match = _TOKENS.search(code)
    tokens = tokens or (match[1] if match else "")
    sources, buffers = _sources(code), Buffers(code, {tokens: "T"} if tokens else {})
    found, comment, begin = [], ("", ""), max(0, code.find(_BEGIN))
    for line in code[begin:].splitlines():
        if match := _NODES.search(line):
            comment = match.groups()
            continue
        call = _CALL.match(line)
        name = call["name"].removesuffix(".run") if call else ""
        outside = name.startswith(("extern_kernels.", "torch.ops."))
        buffers.take(line)
        if outside or name in sources:
            moved = _moved(name, line, sources.get(name, ""), buffers)
            found.append(_kernel(name, line.strip(), sources.get(name, ""), comment, moved))
            comment = ("", "")
    return found


def _kernel(
    name: str, line: str, source: str, comment: tuple[str, ...], moved: Moved
) -> dict[str, Any]:
    own = _NODES.search(source)
    model, aten = own.groups() if own else ("", "") if source.startswith("cpp") else comment
    group = group_of(name)
    if source and "index_put" in aten:  # combined kernels are named after nothing that is in them
        group = KV_WRITE
    return {
        "name": name,
        "call": line[:400],
        "source": source,
        "aten": [one for one in aten.split(", ") if one],
        "model_nodes": [one for one in model.split(", ") if one],
        "graph_nodes": list(dict.fromkeys(_GRAPH_NODE.findall(source))),
        "group": PRODUCTS if moved.detail else group,
        **_bytes(moved),
        "parts": [_bytes(part) for part in moved.parts],
    }


def _bytes(moved: Moved) -> dict[str, Any]:
    return {"bytes_read": moved.read, "bytes_written": moved.written, "detail": moved.detail}


def _moved(name: str, line: str, source: str, buffers: Buffers) -> Moved:
    try:
        (statement,) = ast.parse(line.strip()).body[:1]
    except (SyntaxError, ValueError):
        return Moved()
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call):
        return Moved()
    if source:
        return moved_by_kernel(source, call, buffers)
    moved, out = moved_by_product(name, call, buffers)
    if out is not None and isinstance(statement, ast.Assign):
        buffers.note(ast.unparse(statement.targets[0]), out)
    return moved


def _sources(code: str) -> dict[str, str]:
    """By kernel, its definition and the comments above it."""
    found = {}
    for match in _DEFINITION.finditer(code):
        end = re.compile(r"^('''|\"\"\").*\)$", re.MULTILINE).search(code, match.end())
        above = code.rfind("\n\n\n", 0, match.start()) + 1
        found[match[1]] = code[above : end.end() if end else match.end()].strip()
    return found
