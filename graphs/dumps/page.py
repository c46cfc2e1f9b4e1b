"""`index.html`: one page for a dump, made of `dump.json` and the raw files alone."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from graphs.dumps.data import raw, read
from graphs.dumps.difference import rows
from graphs.dumps.folder import put
from graphs.dumps.index import Entry, Index
from graphs.dumps.kernels import kernels


def write_page(directory: Path) -> Path:
    """Make the page of a dump, once more if there is one; its path.

    Raises:
        ValueError: the directory is no dump, the dump is not complete, or of another version.
    """
    data = read(directory)
    try:
        index = _index(data["index"])
        text = _page(data, index, directory)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"dump must be complete, got {directory}: {error!r}") from error
    return directory / put(directory, "index.html", text)


def _index(data: dict[str, Any]) -> Index:
    entries = [Entry(**entry) for entry in data["entries"]]
    return Index(**{**data, "entries": entries})


def _page(data: dict[str, Any], index: Index, directory: Path) -> str:
    """The template with the data; `<` is escaped in it, so that no text ends the block."""
    for record in data["passes"]:
        texts = [raw(directory, name) for name in record["files"]]
        record["difference"] = rows(*texts) if len(texts) == 2 else None
    data["kernels"] = [
        {"file": name, "calls": kernels(raw(directory, name))} for name in data["inductor"]
    ]
    data["files"] = [name for entry in index.entries for name in entry.files]
    for name in data["files"]:
        raw(directory, name)
    parts = files("graphs.dumps") / "web"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((parts / "page.html").read_text("utf-8")).render(
        data=json.dumps(data).replace("<", "\\u003c"),
        style=(parts / "page.css").read_text("utf-8"),
        script=(parts / "page.js").read_text("utf-8"),
        listing=index.html(),
    )
