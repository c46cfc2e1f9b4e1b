"""`dump.json`: what the page of a dump is made of, beside the raw files."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch

from fx_passes.observe import PassRecord, Recorder
from fx_passes.pipeline import pass_classes
from graphs.dumps.changes import places
from graphs.dumps.folder import is_dump
from graphs.dumps.index import Index
from graphs.dumps.model_map import attention_groups, module_rows, weight_bytes
from graphs.dumps.timeline import Timeline

FILE = "dump.json"
VERSION = 3
_FORMAT = "attn-ops dump"
_PARTS = {"index": dict, "sessions": list, "passes": list, "graphs": list}


def data_of(
    recorder: Recorder, index: Index, sessions: list[dict[str, Any]], timeline: Timeline
) -> str:
    """The text of `dump.json`.

    Args:
        index: its entries name the files of passes, final graphs and output code, in order.
        sessions: see `session_data`.
        timeline: see `graphs.dumps.timeline`.
    """
    files: dict[str, list[list[str]]] = {"passes": [], "final": [], "inductor": []}
    for entry in index.entries:
        files.setdefault(entry.section, []).append(entry.files)
    graphs = zip(recorder.final_graphs, recorder.final_nodes, files["final"], strict=True)
    calls = {record.graph_name: record.num_calls for record in recorder.passes}
    data = {
        "format": _FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "index": dataclasses.asdict(index),
        "sessions": sessions,
        "passes": [_pass(*one) for one in zip(recorder.passes, files["passes"], strict=True)],
        "graphs": [
            {"name": name, "num_calls": calls.get(name, 1), "file": file, "nodes": nodes}
            for (name, _), nodes, (file,) in graphs
        ],
        "inductor": [file for (file,) in files["inductor"]],
        "timeline": timeline[0],
        "timeline_why": timeline[1],
    }
    return json.dumps(data, default=str)


def session_data(session: Any) -> dict[str, Any]:
    """A session's report, the same in words, its modules and attention, and bytes by owner."""
    report = session.report()
    return {
        **report.as_dict(),
        "verdict": str(report),
        "backends_against": session.backend_selection.reasons_against,
        "block_size": session.cache.block_size,
        "modules": module_rows(session.original),
        "attention": attention_groups(session.original, session.specs),
        "memory": {
            "weights": weight_bytes(session.original),
            "cache": session.cache.num_bytes,
            "graph pools": report.graph_bytes,
        },
    }


def _pass(record: PassRecord, files: list[str]) -> dict[str, Any]:
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
        "places": places(*record.nodes) if record.nodes else [],
    }


def _purpose(name: str) -> str:
    """What a pass is for: the first paragraph of its class."""
    found = next((one for one in pass_classes() if one.name == name), None)
    text = inspect.getdoc(found) if found is not None and found.__doc__ else None
    return " ".join((text or "").partition("\n\n")[0].split()).replace("`", "")


def read(directory: Path) -> dict[str, Any]:
    """Read `dump.json`.

    Raises:
        ValueError: the directory is no dump, the dump is not complete, or of another version.
    """
    if not is_dump(directory):
        raise ValueError(f"directory must be a dump, got {directory}; `graphs.dump` writes one")
    try:
        data = json.loads(raw(directory, FILE))
    except json.JSONDecodeError as error:
        raise ValueError(f"dump must be complete, got a truncated {FILE}: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{FILE} must be of a dump, got {directory / FILE} of another format")
    if data.get("version") != VERSION:
        raise ValueError(
            f"version of a dump must be known, got {data.get('version')!r}; supported: {VERSION}"
        )
    for part, kind in _PARTS.items():
        if not isinstance(data.get(part), kind):
            raise ValueError(f"dump must be complete, got {directory / FILE} without {part}")
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
