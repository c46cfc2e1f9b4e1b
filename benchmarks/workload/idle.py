"""How long the GPU does nothing, from a trace of torch.profiler: the gaps between its kernels."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that keep the GPU busy."""

LONG_US = 200.0


@dataclasses.dataclass(frozen=True)
class Idle:
    """Of a stretch of a run."""

    span_ms: float  # from the first kernel to the end of the last
    busy_ms: float
    num_long: int  # gaps of over `LONG_US`
    long_ms: float  # their sum

    @property
    def share(self) -> float:
        """Of the span, in which the GPU does nothing."""
        return 1 - self.busy_ms / self.span_ms


def idle_of(intervals: Sequence[tuple[float, float]]) -> Idle:
    """Gaps between intervals (begin, end) in microseconds, which may overlap."""
    ordered = sorted(intervals)
    busy, gaps, end = 0.0, [], ordered[0][0]
    for begin, finish in ordered:
        if begin > end:
            gaps.append(begin - end)
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    long = [gap for gap in gaps if gap > LONG_US]
    return Idle((end - ordered[0][0]) / 1e3, busy / 1e3, len(long), sum(long) / 1e3)


def intervals_of(trace: Path) -> list[tuple[float, float]]:
    """Microseconds of everything that the GPU did, of a trace in Chrome's format."""
    events = json.loads(trace.read_text())["traceEvents"]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK]
    return [(e["ts"], e["ts"] + e["dur"]) for e in work]


def profiled(run: Callable[[], object]) -> Idle | None:
    """What the GPU did not do in `run`; None where there is none."""
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
    return idle_of(intervals) if intervals else None
