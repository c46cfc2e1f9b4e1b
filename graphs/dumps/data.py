"""`dump.json`: everything the page of a dump is made of, but what the raw files say themselves.

"kernels": a list, one entry a compiled graph, in the order of "inductor":
    {"file", "calls"}; the fields of a call: see `graphs.dumps.kernels`.
"timeline": what the kernels of one decode step took; see `graphs.dumps.timeline`; null: none.
"timeline_why": why "timeline" is null, in a line; empty where it is not.
"""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch

from fx_passes.observe import PassRecord, Recorder
from fx_passes.pipeline import pass_classes
from graphs.dumps.folder import is_dump
from graphs.dumps.index import Index
from graphs.dumps.tree import attention_groups, live_rows, module_rows

FILE = "dump.json"
VERSION = 2
_FORMAT = "attn-ops dump"
_PARTS: dict[str, type] = {
    "index": dict, "sessions": list, "passes": list, "graphs": list, "inductor": list,
    "kernels": list, "trace": list,
}  # fmt: skip


@dataclasses.dataclass
class Parts:
    """What `dump.json` says beside what a recorder and an index know."""

    passes: list[list[str]]  # files of each run of a pass: before, after; none where it did nothing
    final: list[str] = dataclasses.field(default_factory=list)  # file of each graph
    inductor: list[str] = dataclasses.field(default_factory=list)  # file of each compiled graph
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sessions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pictures: list[list[str]] = dataclasses.field(default_factory=list)  # as `passes`
    trace: list[str] = dataclasses.field(default_factory=list)  # files of torch's structured trace
    timeline: dict[str, Any] | None = None
    timeline_why: str = ""


def data_of(recorder: Recorder, index: Index, parts: Parts) -> str:
    """The text of `dump.json`."""
    runs = zip(recorder.passes, parts.passes, parts.pictures, strict=True)
    graphs = zip(recorder.final_graphs, recorder.final_nodes, parts.final, strict=True)
    calls = {record.graph_name: record.num_calls for record in recorder.passes}
    described = [
        {"name": name, "num_calls": calls.get(name, 1), "file": file, "nodes": nodes}
        for (name, _), nodes, file in graphs
    ]
    for graph, rows in zip(described, live_rows(described), strict=True):
        graph["live_rows"] = rows
    data = {
        "format": _FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "index": dataclasses.asdict(index),
        "sessions": parts.sessions,
        "passes": [_pass(*run) for run in runs],
        "graphs": described,
        "inductor": parts.inductor,
        "kernels": parts.kernels,
        "trace": parts.trace,
        "timeline": parts.timeline,
        "timeline_why": parts.timeline_why,
    }
    return json.dumps(data, default=str)


def session_data(session: Any) -> dict[str, Any]:
    """A session's report, the same in words, and bytes by owner."""
    report = session.report()
    weights = {p.untyped_storage().data_ptr(): p for p in session.original.parameters()}
    return {
        **report.as_dict(),
        "verdict": str(report),
        "backends_against": session.backend_selection.reasons_against,
        "block_size": session.cache.block_size,
        "modules": module_rows(session.original, session.specs, session.cache.own_blocks),
        "attention": attention_groups(session.original, session.specs),
        "memory": {
            "weights": sum(p.untyped_storage().nbytes() for p in weights.values()),
            "cache": session.cache.num_bytes,
            "graph pools": report.graph_bytes,
        },
    }


def _pass(record: PassRecord, files: list[str], pictures: list[str]) -> dict[str, Any]:
    before, after = record.operators or ({}, {})
    return {
        "name": record.pass_name,
        "purpose": _purpose(record.pass_name),
        "stage": record.stage,
        "graph": record.graph_name,
        "num_calls": record.num_calls,
        "matches": record.matches,
        "in_words": record.matches_in_words(),
        "skipped": record.skipped,
        "summary": record.summary,
        "error": record.error,
        "before": before,
        "after": after,
        "files": files,
        "facts": record.facts,
        "pictures": pictures,
    }


def _purpose(name: str) -> str:
    """What a pass is for: the first paragraph of its class."""
    found = next((one for one in pass_classes() if one.name == name), None)
    text = inspect.getdoc(found) if found is not None and found.__doc__ else None
    return " ".join((text or "").partition("\n\n")[0].split()).replace("`", "")


def read(directory: Path) -> dict[str, Any]:
    """What `dump.json` holds.

    Raises:
        ValueError: the directory is no dump, the dump is not complete, or of another version.
    """
    if not is_dump(directory):
        raise ValueError(f"directory must be a dump, got {directory}; `graphs.dump` writes one")
    path = directory / FILE
    if not path.is_file() or path.is_symlink():
        raise ValueError(f"dump must be complete, got {directory} without {FILE}")
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"dump must be complete, got a truncated {path}: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{FILE} must be of a dump, got {path} of another format")
    if data.get("version") != VERSION:
        raise ValueError(
            f"version of a dump must be known, got {data.get('version')!r}; supported: {VERSION}"
        )
    for part, kind in _PARTS.items():
        if not isinstance(data.get(part), kind):
            raise ValueError(f"dump must be complete, got {path} without {part}")
    return data


def raw(directory: Path, name: Any) -> str:
    """The text of a raw file of a dump.

    Raises:
        ValueError: the name leads out of the directory, or the file is missing.
    """
    root = directory.resolve()
    path = (root / str(name)).resolve()
    if not isinstance(name, str) or not path.is_relative_to(root):
        raise ValueError(f"file of a dump must be inside it, got {name!r}")
    if not path.is_file():
        raise ValueError(f"dump must be complete, got {directory} without {name}")
    return path.read_text("utf-8")
