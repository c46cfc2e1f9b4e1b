"""What the device does in a run: how long its launches take, and how much of the time it idles."""

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from graphs.launcher import DecodeLauncher, LaunchedSteps
from graphs.step.tensors import StepTensors

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that keep the GPU busy."""

Stamp = torch.cuda.Event | float
"""A moment on the device; on a CPU a time of the host, in seconds."""


def ms_between(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


@contextlib.contextmanager
def timed_launches(device: torch.device) -> Iterator[list[tuple[Stamp, Stamp]]]:
    """From upload to copy of the tokens of each launch in the block; read when all is done."""
    found: list[tuple[Stamp, Stamp]] = []
    begins: list[Stamp] = []  # of the launches that are being made

    def stamp() -> Stamp:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(original: Callable[..., LaunchedSteps]) -> Callable[..., LaunchedSteps]:
        @functools.wraps(original)
        def launch(self: DecodeLauncher, *arguments: Any, **keywords: Any) -> LaunchedSteps:
            begins.append(stamp())
            try:
                launched = original(self, *arguments, **keywords)
            finally:
                begin = begins.pop()
            found.append((begin, stamp()))
            return launched

        return launch

    upload = StepTensors.upload

    def uploading(self: StepTensors, *, edits: bool = True) -> None:
        """What the host did before is none of the device's time, though the device may be idle."""
        if begins:
            begins[-1] = stamp()
        upload(self, edits=edits)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(StepTensors, "upload", uploading))
        for name in ("launch", "call", "follow"):
            replaced = timed(getattr(DecodeLauncher, name))
            stack.enter_context(mock.patch.object(DecodeLauncher, name, replaced))
        yield found


def idle_share(intervals: Sequence[tuple[float, float]]) -> float:
    """Share of the span of intervals (begin, end), which may overlap, that none of them covers."""
    ordered = sorted(intervals)
    busy, end = 0.0, ordered[0][0]
    for begin, finish in ordered:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return 1 - busy / (end - ordered[0][0])


def intervals_of(trace: Path) -> list[tuple[float, float]]:
    """Microseconds of everything that the GPU did, of a trace in Chrome's format."""
    events = json.loads(trace.read_text())["traceEvents"]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK]
    return [(e["ts"], e["ts"] + e["dur"]) for e in work]


def idle_of(run: Callable[[], object]) -> float | None:
    """Share of a run's time in which the GPU does nothing; None where there is none."""
    if not torch.cuda.is_available():
        run()
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        intervals = intervals_of(trace)
    return idle_share(intervals) if intervals else None
