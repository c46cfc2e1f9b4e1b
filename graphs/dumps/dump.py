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
    timeline/              the trace of one decode step, for Perfetto or chrome://tracing
    depyf/                 depyf's files: the decompiled frame, and graphs of the stages between
    trace/                 torch's structured trace, for `tlparse`

A part that cannot be made is left out, with a warning and a note in the index.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch._functorch.config as functorch_config
from torch._inductor.codecache import PyCodeCache

from fx_passes.observe import Recorder, recording
from fx_passes.pipeline import broken_passes
from graphs.dumps.attempts import Attempts
from graphs.dumps.data import FILE, Parts, data_of, session_data
from graphs.dumps.depyf import writing_depyf_files
from graphs.dumps.folder import make_room, put
from graphs.dumps.index import Entry, Index
from graphs.dumps.kernels import kernels_of
from graphs.dumps.page import write_page
from graphs.dumps.raw_files import (
    depyf_entries,
    final_entries,
    inductor_entries,
    layout_entries,
    pass_entry,
    picture_entries,
    trace_entries,
)
from graphs.dumps.timeline.record import timeline_of, timeline_of_call
from graphs.dumps.trace import compilations, writing_trace
from graphs.report import SessionReport

_NO_TIMELINE = (None, "it failed; see the notes")


@contextlib.contextmanager
def dump(
    directory: str | os.PathLike[str], profile: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Write what is compiled inside the block, and where it came from; yields the directory's path.

    A `DecodeSession` whose model was compiled before the block compiles it once more in its first
    step inside the block (`torch._dynamo.reset()` first), so that there is something to see. Any
    other function that was compiled before leaves nothing. Passes run ahead of Inductor's cache,
    and on a hit Inductor still loads its output file, so a warm cache changes nothing. Hits of
    AOTAutograd's cache would skip passes, so it is off inside. When the block raises, what was
    recorded until then is written.

    Args:
        directory: made if it is missing; an earlier dump in it is replaced.
        profile: called without arguments when the block ends, where it may compile, and up to
            eight times more for the timeline. None: the timeline is of a session's step.

    Raises:
        TypeError: `directory` is no path.
        ValueError: `directory` is a file, holds something that is not a dump, or holds symbolic
            links where a dump writes; or `profile` cannot be called.
    """
    if profile is not None and not callable(profile):
        raise ValueError(f"profile must be None or callable without arguments, got {profile!r:.80}")
    # Here: without a dump nothing is drawn.
    from fx_passes.pictures.nodes import nodes_of
    from fx_passes.pictures.picture import draw

    directory, attempts = make_room(directory), Attempts()
    recorder = Recorder(
        True, attempts.drawing(draw), attempts.guarded("nodes of a graph", nodes_of, []), directory
    )
    loaded, failed = {id(module) for module in PyCodeCache.modules}, True
    try:
        with (
            recording(recorder),
            writing_depyf_files(directory / "depyf", attempts.notes),
            writing_trace(directory, attempts.notes),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield directory
            if profile is not None:
                profile()
    except BaseException as error:
        attempts.notes.append(
            f"The block ended with {type(error).__name__}; this is what was recorded until then."
        )
        raise
    else:
        failed = False
    finally:
        modules = [m for m in PyCodeCache.modules if id(m) not in loaded]
        _write(directory, recorder, modules, attempts, failed, profile)


def _write(
    directory: Path,
    recorder: Recorder,
    modules: list[ModuleType],
    attempts: Attempts,
    failed: bool,
    profile: Callable[[], object] | None,
) -> None:
    parts, entries = _raw_parts(directory, recorder, modules, attempts)
    if failed:
        parts.timeline_why = "the block ended with an error"
    elif profile is not None:
        record = attempts.guarded("timeline", timeline_of_call, _NO_TIMELINE)
        parts.timeline, parts.timeline_why = record(profile, directory)
    else:
        _add_timeline(directory, recorder, parts, attempts)
    if parts.timeline is not None:
        text = f"{parts.timeline['what']}, for https://ui.perfetto.dev or chrome://tracing"
        entries.append(Entry("timeline", text, [parts.timeline["trace"]], []))
    entries.append(Entry("data", "what the page `index.html` is made of, beside these", [FILE], []))
    notes = attempts.notes
    if not recorder.passes and not modules:
        notes.append(
            "Nothing was compiled inside. A DecodeSession compiles its model once more in "
            "its first step inside the block; anything else must be called for the first time "
            "inside, or after torch._dynamo.reset()."
        )
    elif not recorder.passes:
        notes.append(
            "No pass of attn_ops ran: torch.compile runs them with backend='attn_ops', and some "
            "with options=fx_passes.options()."
        )
    described = attempts.guarded("session", lambda one: (one.report(), session_data(one)), None)
    sessions = [found for one in recorder.sessions if (found := described(one)) is not None]
    parts.sessions += [data for _, data in sessions]
    lines = [_session_line(report) for report, _ in sessions]
    notes += [f"The installed pass {n} is left out: {why}." for n, why in broken_passes().items()]
    matches, summaries = recorder.matches_in_words(), recorder.summaries()
    found = [one for name in parts.trace for one in compilations((directory / name).read_text())]
    num_graphs = recorder.num_graphs or len(found)  # the backend counts them, if it is ours
    compiled = [_compiled_line(one) for one in found]
    index = Index(num_graphs, matches, summaries, lines, notes, entries, compiled)
    put(directory, "index.md", index.markdown())
    put(directory, FILE, data_of(recorder, index, parts))
    attempts.guarded("page", write_page, None)(directory)


def _raw_parts(
    directory: Path, recorder: Recorder, modules: list[ModuleType], attempts: Attempts
) -> tuple[Parts, list[Entry]]:
    """Write the raw files; what `dump.json` says of them, and their lines in the index."""
    entries = [pass_entry(directory, i, p) for i, p in enumerate(recorder.passes, 1)]
    parts = Parts(passes=[entry.files for entry in entries])
    pictures = picture_entries(directory, recorder.passes)
    parts.pictures = [pictures[i].files if i in pictures else [] for i in range(len(entries))]
    entries += pictures.values()
    layouts = attempts.guarded("pictures of layouts", layout_entries, [])
    entries += layouts(directory, [session.original for session in recorder.sessions])
    final, inductor = final_entries(directory, recorder), inductor_entries(directory, modules)
    parts.final = [entry.files[0] for entry in final]
    parts.inductor = [entry.files[0] for entry in inductor]
    codes = [(directory / name).read_text("utf-8") for name in parts.inductor]
    calls = attempts.guarded("kernels", kernels_of, [[] for _ in codes])(codes)
    parts.kernels = [
        {"file": name, "calls": found} for name, found in zip(parts.inductor, calls, strict=True)
    ]
    traces = trace_entries(directory)
    parts.trace = [name for entry in traces for name in entry.files]
    return parts, [*entries, *final, *inductor, *depyf_entries(directory), *traces]


def _add_timeline(directory: Path, recorder: Recorder, parts: Parts, attempts: Attempts) -> None:
    """Of the session that has captured most, of those that were compiled here."""
    sessions = sorted(recorder.sessions, key=lambda one: len(one.graphs or ()))
    if not sessions or not parts.inductor:
        parts.timeline_why = "no decode session was compiled inside"
        return
    calls = {record.graph_name: record.num_calls for record in recorder.passes}
    names = [name for name, _ in recorder.final_graphs]
    graphs = [
        {"name": name, "calls": code["calls"], "num_calls": calls.get(name, 1)}
        for name, code in zip(names, parts.kernels, strict=False)
    ]
    alone = len(sessions) == 1 and len(names) == len(parts.kernels)
    record = attempts.guarded("timeline", timeline_of, _NO_TIMELINE)
    found = record(sessions[-1], directory, graphs if alone else [])
    parts.timeline, parts.timeline_why = found


def _compiled_line(one: dict[str, Any]) -> str:
    again = f", again as {' '.join(one['why'].split())}" if one["why"] else ""
    failed = f", which failed: {' '.join(one['failed'].split())}" if one["failed"] else ""
    return f"`{one['function']}` ({one['place']}) in {one['seconds']:.1f} s{again}{failed}"


def _session_line(report: SessionReport) -> str:
    return (
        f"backend {report.backend} ({report.backend_why}); CUDA graphs: {report.mode_in_words}; "
        f"{report.num_graphs} graphs, {report.num_breaks} breaks, {report.num_recompiles} "
        "recompiles after warm-up"
    )
