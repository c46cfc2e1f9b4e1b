"""torch's structured trace as part of a dump: the file that `tlparse` reads.

Whatever goes wrong with it becomes a note, and the compilation goes on without it.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
import torch._logging._internal as torch_logging

from graphs.dumps.folder import put

FILE = "trace/dedicated_log_torch_trace.log"
"""`tlparse FILE` makes its own page of it."""

_ORIGINS = "inductor_provenance_tracking_node_mappings"
_WHICH = re.compile(r"^\d+/\d+: ")  # earlier compilation: its number
_WITHOUT_STACKS = 2  # of trace.provenance_tracking_level: which nodes a kernel came from, no more


@contextlib.contextmanager
def writing_trace(directory: Path, notes: list[str]) -> Iterator[None]:
    """Keep what torch logs of its compilations inside the block; kernels name their nodes."""
    with contextlib.ExitStack() as stack:
        try:
            path = directory / put(directory, FILE, "")
            path.write_text("")
            stack.callback(_drop_if_empty, path)
            handler = logging.FileHandler(path, encoding="utf-8", delay=True)
            stack.callback(handler.close)
            handler.setFormatter(torch_logging.TorchLogsFormatter(trace=True))
            torch_logging.trace_log.addHandler(handler)
            stack.callback(torch_logging.trace_log.removeHandler, handler)
            level = {"trace.provenance_tracking_level": _WITHOUT_STACKS}
            stack.enter_context(inductor_config.patch(level))
        except Exception as error:
            notes.append(f"torch's structured trace is left out: {type(error).__name__}: {error}")
        yield


def _drop_if_empty(path: Path) -> None:
    """Nothing was compiled."""
    with contextlib.suppress(OSError):
        if not path.stat().st_size:
            path.unlink()
            path.parent.rmdir()


def origins(text: str) -> list[dict[str, list[str]]]:
    """The nodes of each `kernel:number`, for every graph that Inductor compiled, in order.

    Lines that are no JSON, and payloads of another form, are passed over.
    """
    found, payload, wanted = [], [], False
    for line in (*text.splitlines(), ""):
        if line.startswith("\t"):
            if wanted:
                payload.append(line[1:])
            continue
        if wanted:
            found.append(_nodes("\n".join(payload)))
        payload, wanted = [], f'"{_ORIGINS}"' in line
    return found


def compilations(text: str) -> list[dict[str, Any]]:
    """Each time that Dynamo compiled a frame, in order.

    {"function", "place", "seconds", "why", "failed"}: "why" is the guard that failed where the
    frame had been compiled before, "failed" the error of a compilation that failed, else "".
    Lines of another form are passed over.
    """
    found = []
    for line in text.splitlines():
        _, is_there, rest = line.partition('{"compilation_metrics": ')
        if not is_there:
            continue
        try:
            metrics = json.JSONDecoder().raw_decode(rest)[0]
            one = {
                "function": str(metrics["co_name"]),
                "place": f"{metrics['co_filename']}:{metrics['co_firstlineno']}",
                "seconds": float(metrics.get("entire_frame_compile_time_s") or 0.0),
                "why": _WHICH.sub("", str(metrics.get("recompile_reason") or "")),
                "failed": str(metrics.get("fail_reason") or ""),
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        found.append(one)
    return found


def _nodes(payload: str) -> dict[str, list[str]]:
    try:
        calls = json.loads(payload)["cppCodeToPost"]
        return {name: [str(node) for node in nodes] for name, nodes in calls.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
