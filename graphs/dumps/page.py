"""`index.html`: one page for a dump, made from `dump.json` and the raw files alone."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from graphs.dumps import trace
from graphs.dumps.assigned import beside_calls
from graphs.dumps.changes import rows
from graphs.dumps.data import raw, read
from graphs.dumps.folder import put
from graphs.dumps.index import SECTIONS
from graphs.dumps.kernels import Sizes, calls_of

_SCRIPTS = ("parts.js", "pictures.js", "model.js", "passes.js", "timeline.js", "page.js")


def write_page(directory: Path) -> Path:
    """Make the page of a dump, again if there is one; returns its path.

    Raises:
        ValueError: the directory is no dump, the dump is not complete, or of another version.
    """
    data, parts = whole(directory), files("graphs.dumps") / "web"
    style = (parts / "page.css").read_text("utf-8")
    script = "\n".join((parts / name).read_text("utf-8") for name in _SCRIPTS)
    texts = {
        "data": json.dumps(data).replace("<", "\\u003c"),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
    }
    page = (parts / "page.html").read_text("utf-8")
    page = re.sub(r"\{\{ (\w+) \}\}", lambda match: texts[match[1]], page)
    return directory / put(directory, "index.html", page)


def _hash(text: str) -> str:
    """The hash by which the page allows its own script and style, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def whole(directory: Path) -> dict[str, Any]:
    """`dump.json` with what the raw files say; errors: see `write_page`."""
    data = read(directory)
    try:
        _fill(data, directory)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"dump must be complete, got {directory}: {error!r}") from error
    return data


def _fill(data: dict[str, Any], directory: Path) -> None:
    """Add differences, kernels and the timeline, from the raw files."""
    data["sections"] = SECTIONS
    data["files"] = [name for entry in data["index"]["entries"] for name in entry["files"]]
    texts = {name: raw(directory, name) for name in (*data["files"], *data["inductor"])}
    for record in data["passes"]:
        sides = [texts[name] for name in record["files"]]
        record["difference"] = rows(*sides) if len(sides) == 2 else None
    log = texts.get(trace.FILE, "")
    data["compiled"] = trace.compilations(log)
    data["kernels"] = _kernels(data, [texts[name] for name in data["inductor"]], log)
    if data["timeline"] is not None:
        ran = [one["calls"] for one in data["kernels"]]
        num_calls = [one["num_calls"] for one in data["kernels"]]
        data["timeline"] = beside_calls(data["timeline"], ran, num_calls)


def _kernels(data: dict[str, Any], codes: list[str], log: str) -> list[dict[str, Any]]:
    """The calls of each file of Inductor's code, and the graph that it was made of if known."""
    step, graphs, origins = data["timeline"] or {}, data["graphs"], trace.origins(log)
    origins = origins if len(origins) == len(codes) else [{}] * len(codes)
    sizes = Sizes(
        num_tokens=step.get("num_tokens", 1),
        num_cached=step.get("seq_len") or 0,
        num_reqs=step.get("num_reqs") or 1,
        block_size=next((one["block_size"] for one in data["sessions"]), 16),
    )
    found = []
    for i, (code, file) in enumerate(zip(codes, data["inductor"], strict=True)):
        graph = graphs[i] if len(graphs) == len(codes) else {"nodes": [], "num_calls": 1}
        calls = calls_of(code, origins[i], graph["nodes"], sizes)
        number = i if len(graphs) == len(codes) else None
        found.append(
            {"file": file, "graph": number, "num_calls": graph["num_calls"], "calls": calls}
        )
    return found
