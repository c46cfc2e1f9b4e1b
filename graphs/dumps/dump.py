"""`dump(directory)`: writes what became of the model, from Dynamo's graph to Inductor's code.

The directory holds:
    index.html             a page to open first; needs no network
    index.md               everything below in order, with match counts and skip reasons
    dump.json              what the page is made of, beside the files below
    passes/                FX text before and after every pass that changed its graph
    pictures/              which blocks of keys block-sparse layers see (SVG)
    final/                 the ATen graphs as Inductor got them
    inductor/              Inductor's output code, kernels included
    timeline/              the trace of one decode step, for Perfetto or chrome://tracing
    depyf/                 depyf's files: the decompiled frame, and graphs of the stages between
    trace/                 torch's structured trace, for `tlparse`

A part that cannot be made is left out, with a warning and a note in the index.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch._functorch.config as functorch_config
from torch._inductor.codecache import PyCodeCache

from fx_passes.observe import Recorder, recording
from fx_passes.pipeline import broken_passes
from graphs.dumps import trace
from graphs.dumps.data import FILE, data_of, session_data
from graphs.dumps.depyf import writing_depyf_files
from graphs.dumps.folder import make_room, put
from graphs.dumps.index import (
    Entry,
    Index,
    depyf_entries,
    final_entries,
    inductor_entries,
    layout_entries,
    pass_entry,
    trace_entries,
)
from graphs.dumps.nodes import nodes_of
from graphs.dumps.page import write_page
from graphs.dumps.timeline import Timeline, timeline_of, timeline_of_call
from graphs.report import SessionReport

logger = logging.getLogger(__name__)


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
        ValueError: `directory` is a file or holds something that is not a dump, or `profile` cannot
            be called.
    """
    if profile is not None and not callable(profile):
        raise ValueError(f"profile must be None or callable without arguments, got {profile!r:.80}")
    directory, notes = make_room(directory), []
    describe = functools.partial(_attempt, notes, "nodes of a graph", [], nodes_of)
    recorder = Recorder(texts=True, describe=describe, directory=directory)
    loaded, failed = {id(module) for module in PyCodeCache.modules}, True
    try:
        with (
            recording(recorder),
            writing_depyf_files(directory / "depyf", notes),
            trace.writing_trace(directory, notes),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield directory
            if profile is not None:
                profile()
    except BaseException as error:
        notes.append(
            f"The block ended with {type(error).__name__}; this is what was recorded until then."
        )
        raise
    else:
        failed = False
    finally:
        modules = [m for m in PyCodeCache.modules if id(m) not in loaded]
        _write(directory, recorder, modules, notes, failed, profile)


def _attempt(
    notes: list[str], what: str, default: Any, function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function; if it raises, warn, add a note and return `default`."""
    try:
        return function(*args)
    except Exception as error:
        line = " ".join(str(error).split()) or "no message"
        note = f"left out of the dump: {what}: {type(error).__name__}: {line}"
        if note not in notes:
            logger.warning(note)
            notes.append(note)
        return default


def _write(
    directory: Path,
    recorder: Recorder,
    modules: list[ModuleType],
    notes: list[str],
    failed: bool,
    profile: Callable[[], object] | None,
) -> None:
    attempt = functools.partial(_attempt, notes)
    entries = [pass_entry(directory, i, one) for i, one in enumerate(recorder.passes, 1)]
    models = [session.original for session in recorder.sessions]
    entries += attempt("pictures of layouts", [], layout_entries, directory, models)
    entries += final_entries(directory, recorder)
    entries += inductor_entries(directory, modules)
    entries += [*depyf_entries(directory), *trace_entries(directory)]
    timeline = (None, "the block ended with an error")
    if not failed:
        default = (None, "it failed; see the notes")
        timeline = attempt("timeline", default, _timeline, directory, recorder, profile)
    if timeline[0] is not None:
        text = f"{timeline[0]['what']}, for https://ui.perfetto.dev or chrome://tracing"
        entries.append(Entry("timeline", text, [timeline[0]["trace"]]))
    entries.append(Entry("data", "what the page `index.html` is made of, beside these", [FILE]))
    notes += _notes(recorder, modules)
    sessions = [
        found
        for one in recorder.sessions
        if (found := attempt("session", None, lambda s: (s.report(), session_data(s)), one))
    ]
    text = (directory / trace.FILE).read_text() if (directory / trace.FILE).is_file() else ""
    compiled = trace.compilations(text)
    index = Index(
        num_graphs=recorder.num_graphs or len(compiled),  # the backend counts them, if it is ours
        matches=recorder.matches_in_words(),
        summaries=recorder.summaries(),
        sessions=[_session_line(report) for report, _ in sessions],
        compiled=[_compiled_line(one) for one in compiled],
        notes=notes,
        entries=entries,
    )
    put(directory, "index.md", index.markdown())
    put(directory, FILE, data_of(recorder, index, [data for _, data in sessions], timeline))
    attempt("page", None, write_page, directory)


def _timeline(
    directory: Path, recorder: Recorder, profile: Callable[[], object] | None
) -> Timeline:
    """Record a call of `profile`, else a step of the session that has captured most."""
    if profile is not None:
        return timeline_of_call(profile, directory)
    sessions = sorted(recorder.sessions, key=lambda one: len(one.graphs or ()))
    if not sessions or not recorder.final_graphs:
        return None, "no decode session was compiled inside"
    return timeline_of(sessions[-1], directory)


def _notes(recorder: Recorder, modules: list[ModuleType]) -> list[str]:
    notes = [f"The installed pass {n} is left out: {why}." for n, why in broken_passes().items()]
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
    return notes


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
