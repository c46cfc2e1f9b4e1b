"""What torch's profiler saw of one step: a trace file, and the kernels or operators in it."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel or an operator; times in microseconds."""

    name: str
    start_us: float
    us: float
    early_us: float = 0.0  # before `start_us` in which it was on the device beside others

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def recorded(run: Callable[[], object], device: torch.device, path: Path) -> None:
    """Run something once under the profiler; the trace goes into a file."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def kernels_in(path: Path, *, on_gpu: bool) -> list[Kernel]:
    """What a trace file holds, in the order in which it began; the first begins at 0.

    Of CPU operators, the outermost ones of ATen and of this project.

    Raises:
        ValueError: the file is no trace.
    """
    try:
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        found = [
            Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]))
            for event in events
            if event.get("ph") == "X" and _counts(event, on_gpu)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"file must be a trace of torch.profiler, got {path}") from error
    found.sort(key=lambda kernel: (kernel.start_us, -kernel.us))
    found = found if on_gpu else _outermost(found)
    begin = found[0].start_us if found else 0.0
    return [dataclasses.replace(one, start_us=one.start_us - begin) for one in found]


def in_turn(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels that begin when those before have ended.

    One that is launched early waits on the device for the ones before: that is not its time.
    """
    found, end = [], 0.0
    for one in kernels:
        begin = min(max(one.start_us, end), one.end_us)
        end = max(end, one.end_us)
        found.append(Kernel(one.name, begin, one.end_us - begin, begin - one.start_us))
    return found


def _counts(event: dict[str, Any], on_gpu: bool) -> bool:
    if on_gpu:
        return event.get("cat") in _ON_GPU
    return event.get("cat") == "cpu_op" and event["name"].startswith(("aten::", "attn_ops::"))


def _outermost(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Without those that begin inside of another one."""
    found: list[Kernel] = []
    for one in kernels:
        if not found or one.start_us >= found[-1].end_us:
            found.append(one)
    return found


def idle_before(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds before each kernel in which none ran; 0 for those that overlap."""
    gaps, end = [], 0.0
    for one in kernels:
        gaps.append(max(0.0, one.start_us - end))
        end = max(end, one.end_us)
    return gaps
