"""`index.html`: one page for a dump, made of `dump.json` and the raw files alone."""

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from fx_passes.naming import runs_in
from graphs.dumps.calls import beside_graph
from graphs.dumps.data import raw, read
from graphs.dumps.difference import rows
from graphs.dumps.folder import put
from graphs.dumps.index import Entry, Index
from graphs.dumps.places import places
from graphs.dumps.timeline.assigned import beside_calls
from graphs.dumps.trace import compilations, origins


def write_page(directory: Path) -> Path:
    """Make the page of a dump, once more if there is one; its path.

    Raises:
        ValueError: the directory is no dump, the dump is not complete, or of another version.
    """
    return directory / put(directory, "index.html", page_of(directory))


def page_of(directory: Path) -> str:
    """The text of the page; errors: see `write_page`."""
    data, index = whole(directory)
    parts = files("graphs.dumps") / "web"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    names = (
        "parts.js",
        "layout.js",
        "words.js",
        "graph.js",
        "places.js",
        "passes.js",
        "timeline.js",
        "page.js",
    )
    style = (parts / "page.css").read_text("utf-8")
    script = "\n".join((parts / name).read_text("utf-8") for name in names)
    return environment.from_string((parts / "page.html").read_text("utf-8")).render(
        data=json.dumps(data).replace("<", "\\u003c"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        listing=index.html(),
    )


def _hash(text: str) -> str:
    """By which the page allows a script or style of its own, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def whole(directory: Path) -> tuple[dict[str, Any], Index]:
    """`dump.json` with what the raw files say; errors: see `write_page`."""
    data = read(directory)
    try:
        index = _index(data["index"])
        _fill(data, index, directory)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"dump must be complete, got {directory}: {error!r}") from error
    return data, index


def _index(data: dict[str, Any]) -> Index:
    entries = [Entry(**entry) for entry in data["entries"]]
    return Index(**{**data, "entries": entries})


def _fill(data: dict[str, Any], index: Index, directory: Path) -> None:
    """Differences, kernels and the timeline, from the raw files."""
    for record in data["passes"]:
        texts = [raw(directory, name) for name in record["files"]]
        record["difference"] = rows(*texts) if len(texts) == 2 else None
        record["places"] = places(*texts) if texts and not record["pictures"] else []
        record["drawn"] = [raw(directory, name) for name in record["pictures"]]
    data["kernels"] = _kernels(data, directory)
    data["files"] = [name for entry in index.entries for name in entry.files]
    for name in (*data["files"], *data["inductor"]):
        raw(directory, name)
    data["compiled"] = [one for name in data["trace"] for one in compilations(raw(directory, name))]
    if data["timeline"] is not None:
        names = [graph["name"] for graph in data["graphs"]]
        kind = data["timeline"]["kind"]
        found = [
            one["calls"]
            if one["graph"] is None or runs_in(names[one["graph"]], names, kind)
            else []
            for one in data["kernels"]
        ]
        calls = [one["num_calls"] for one in data["kernels"]]
        devices = [session["device"] for session in data["sessions"]]  # where the timeline has none
        on_gpu = data["timeline"].setdefault("device", *devices[:1] or ["cpu"]) != "cpu"
        data["timeline"] = beside_calls(data["timeline"], found, calls, on_gpu)


def _kernels(data: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Of every file of Inductor's code, with the graph that it was made of where that is known."""
    codes, graphs = data["kernels"], data["graphs"]
    traced = [one for name in data["trace"] for one in origins(raw(directory, name))]
    traced = traced if len(traced) == len(codes) else [{}] * len(codes)
    block_size = next((s["block_size"] for s in data["sessions"]), 16)
    pairs = len(graphs) == len(codes)
    found = []
    for i, code in enumerate(codes):
        nodes = graphs[i]["nodes"] if pairs else []
        calls = beside_graph(code["calls"], nodes, traced[i], block_size)
        num_calls = graphs[i]["num_calls"] if pairs else 1
        found.append(
            {**code, "calls": calls, "graph": i if pairs else None, "num_calls": num_calls}
        )
    return found
