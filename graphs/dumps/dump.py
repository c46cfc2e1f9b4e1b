"""`dump(directory)`: what became of the model, from Dynamo's graph to Inductor's code, in files.

The directory holds:
    index.html             a page to open first; needs no network
    index.md               everything below in order, with match counts and skip reasons
    dump.json              what the page is made of, beside the files below
    passes/                FX text before and after every pass that changed its graph
    pictures/              flowcharts (Mermaid) before and after, of passes on the Dynamo graph;
                           which blocks of keys block-sparse layers see (SVG)
    final/                 the ATen graphs as Inductor got them
    inductor/              Inductor's output code, kernels included
    depyf/                 depyf's files: the decompiled frame, and graphs of the stages between
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._inductor.codecache import PyCodeCache, get_path

from attn_ops.block_layout import BlockTables, distinct, svg
from fx_passes.naming import safe_name
from fx_passes.observe import PassRecord, Recorder, recording
from fx_passes.pipeline import broken_passes
from graphs.dumps.data import FILE, data_of
from graphs.dumps.depyf import writing_depyf_files
from graphs.dumps.folder import make_room, put
from graphs.dumps.index import Entry, Index
from graphs.dumps.page import write_page
from graphs.report import SessionReport


@contextlib.contextmanager
def dump(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Write what is compiled inside the block, and where it came from; yields the directory's path.

    A `DecodeSession` whose model was compiled before the block compiles it once more in its first
    step inside the block (`torch._dynamo.reset()` first), so that there is something to see. Any
    other function that was compiled before leaves nothing. Passes run ahead of Inductor's cache,
    and on a hit Inductor still loads its output file, so a warm cache changes nothing. When the
    block raises, what was recorded until then is written.

    Args:
        directory: made if it is missing; an earlier dump in it is replaced.

    Raises:
        TypeError: `directory` is no path.
        ValueError: `directory` is a file, holds something that is not a dump, or holds symbolic
            links where a dump writes.
    """
    # Here: without a dump nothing is drawn.
    from fx_passes.pictures.nodes import nodes_of
    from fx_passes.pictures.picture import draw

    directory = make_room(directory)
    recorder, notes = Recorder(True, draw, nodes_of, directory), []
    loaded = {id(module) for module in PyCodeCache.modules}
    try:
        with recording(recorder), writing_depyf_files(directory / "depyf", notes):
            yield directory
    except BaseException as error:
        notes.append(
            f"The block ended with {type(error).__name__}; this is what was recorded until then."
        )
        raise
    finally:
        modules = [m for m in PyCodeCache.modules if id(m) not in loaded]
        _write(directory, recorder, modules, notes)


def _write(
    directory: Path, recorder: Recorder, modules: list[ModuleType], notes: list[str]
) -> None:
    entries = [_pass_entry(directory, i, p) for i, p in enumerate(recorder.passes, 1)]
    files = {"passes": [entry.files for entry in entries]}
    entries += _picture_entries(directory, recorder.passes)
    entries += _layout_entries(directory, [session.original for session in recorder.sessions])
    for section, found in (
        ("final", _final_entries(directory, recorder)),
        ("inductor", _inductor_entries(directory, modules)),
    ):
        files[section] = [entry.files for entry in found]
        entries += found
    entries += _depyf_entries(directory)
    entries.append(Entry("data", "what the page `index.html` is made of, beside these", [FILE], []))
    if not recorder.passes and not modules:
        notes.append(
            "Nothing was compiled inside. A DecodeSession compiles its model once more in "
            "its first step inside the block; anything else must be called for the first time "
            "inside, or after torch._dynamo.reset()."
        )
    sessions = [_session_line(session.report()) for session in recorder.sessions]
    notes += [f"The installed pass {n} is left out: {why}." for n, why in broken_passes().items()]
    matches, summaries = recorder.matches_in_words(), recorder.summaries()
    index = Index(recorder.num_graphs, matches, summaries, sessions, notes, entries)
    put(directory, "index.md", index.markdown())
    put(directory, FILE, data_of(recorder, index, files))
    write_page(directory)


def _pass_entry(directory: Path, number: int, record: PassRecord) -> Entry:
    stage = "Dynamo" if record.stage == "dynamo" else "ATen"
    text = (
        f"{stage} pass `{record.pass_name}` on graph `{record.graph_name}`: "
        f"matches {_one_line(record.matches_in_words())}"
    )
    if record.error is not None:
        text += f"; failed with {_one_line(record.error)}"
    skipped = [_one_line(reason) for reason in record.skipped]
    if record.before == record.after:
        return Entry("passes", f"{text}; the graph stayed as it was, so no files", [], skipped)
    stem = f"{number:02d}-{record.pass_name}-{safe_name(record.graph_name)}"
    files = [
        put(directory, f"passes/{stem}.before.py", record.before or ""),
        put(directory, f"passes/{stem}.after.py", record.after or ""),
    ]
    return Entry("passes", text, files, skipped)


def _picture_entries(directory: Path, passes: list[PassRecord]) -> list[Entry]:
    """Flowcharts by graph and pass; of a second graph of that name, with its pass's number."""
    entries, stems = [], set()
    for number, record in enumerate(passes, 1):
        if record.pictures is None:
            continue
        stem = f"{safe_name(record.graph_name)}_{record.pass_name}"
        stem += f"_{number:02d}" if stem in stems else ""
        stems.add(stem)
        files = [
            put(directory, f"pictures/{stem}_{when}.mmd", text)
            for when, text in zip(("before", "after"), record.pictures, strict=True)
        ]
        text = f"`{record.pass_name}` on graph `{record.graph_name}`, before and after"
        entries.append(Entry("pictures", text, files, []))
    return entries


def _layout_entries(directory: Path, models: list[Any]) -> list[Entry]:
    """A picture of every layout that layers have, with their names."""
    layers: dict[int, list[str]] = {}
    tables: dict[int, BlockTables] = {}
    for model in models:
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, BlockTables):
                tables[id(module)] = module
                layers.setdefault(id(module), []).append(name.rpartition(".")[0])
    entries = []
    for number, (key, found) in enumerate(tables.items(), 1):
        layout, users = found.layout, list(dict.fromkeys(layers[key]))
        file = put(directory, f"pictures/blocks_{number:02d}.svg", svg(layout, distinct(layout)))
        text = (
            f"blocks of {layout.block_size} tokens that {_one_line(', '.join(users))} see, "
            f"{layout.density():.3f} of all; one of the heads that see the same is drawn"
        )
        entries.append(Entry("pictures", text, [file], []))
    return entries


def _final_entries(directory: Path, recorder: Recorder) -> list[Entry]:
    entries = []
    for number, (name, text) in enumerate(recorder.final_graphs, 1):
        file = put(directory, f"final/{number:02d}-{safe_name(name)}.py", text)
        entries.append(
            Entry("final", f"ATen graph `{name}` after all passes, as Inductor got it", [file], [])
        )
    return entries


def _inductor_entries(directory: Path, modules: list[ModuleType]) -> list[Entry]:
    """One file a compiled graph; it holds the kernels too, so their own modules are left out."""
    entries = []
    for module in (m for m in modules if hasattr(m, "call") and m.__file__):
        loaded = Path(module.__file__ or "")  # depyf loads from a copy of its own
        cached = get_path(module.key, "py")[2]
        name = f"inductor/{len(entries) + 1:02d}-{module.key}.py"
        file = put(
            directory,
            name,
            loaded.read_text("utf-8") if loaded.exists() else f"# {loaded} is gone",
        )
        entries.append(
            Entry("inductor", f"Inductor's output code, in its cache `{cached}`", [file], [])
        )
    return entries


def _depyf_entries(directory: Path) -> list[Entry]:
    entries = []
    for path in sorted((directory / "depyf").glob("*.py")):
        if path.name.startswith("full_code_for_"):
            text = "the compiled function as Python, with its guards"
        elif path.name.startswith("__transformed_code_"):
            text = "the frame's bytecode after Dynamo, decompiled"
        else:
            text = f"graph or code at the stage `{path.name.split('.')[1]}`"
        entries.append(Entry("depyf", f"depyf: {text}", [f"depyf/{path.name}"], []))
    return entries


def _one_line(text: str) -> str:
    """A reason is one item of a list, whatever a pass says."""
    return " ".join(text.split())


def _session_line(report: SessionReport) -> str:
    return (
        f"backend {report.backend} ({report.backend_why}); CUDA graphs: {report.mode_in_words}; "
        f"{report.num_graphs} graphs, {report.num_breaks} breaks, {report.num_recompiles} "
        "recompiles after warm-up"
    )
