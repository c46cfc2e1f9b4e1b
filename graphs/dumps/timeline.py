"""Records a timeline: the kernels of one decode step, or of a call of the user's function.

`dump.json` holds it under "timeline", a dict:

    "kind": "replay" of a captured step on a GPU, "called" for an uncaptured step, or "profile" for
        a call of the function that `dump` was given. "what" says it in words.
    "device": "cuda:0" or "cpu"; a CPU has operators in place of kernels.
    "model", "batch": class of the model and the step's key in words; null for "profile", as are
    "num_tokens", "num_reqs", "seq_len": rows, requests, and tokens of each request.
    "replay_us": median of runs, measured with CUDA events; null on a CPU.
    "span_us": from the first kernel's begin to the last one's end.
    "sum_us": time in which at least one kernel ran; "gap_us": the rest of "span_us".
    "bandwidth", "bandwidth_from": bytes a second of a copy on the device, read and written, and how
        that was measured; null: not measured.
    "trace": file with the raw trace, for Perfetto or chrome://tracing.
    "kernels": {"name", "start_us", "us", "early_us"} of each kernel or operator, in order. A kernel
        that is launched early waits on the device for those before it: it starts when they have
        ended, and "early_us" is the time that it waited.

Rows of a decode step are padding. Each reads "seq_len" cached tokens, as many as a request may
have, of blocks that hold whatever they hold, and writes only the null block.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from graphs.context import surroundings
from graphs.dumps.decode_step import NoStep, decode_step

TRACE = "timeline/trace.json"
_COPIED = 256 << 20
"""Bytes of the copy that measures bandwidth; several times those of a GPU's L2 cache."""

Timeline = tuple[dict[str, Any] | None, str]
"""The timeline and "", or None and why there is none."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel or an operator; times in microseconds."""

    name: str
    start_us: float
    us: float
    early_us: float = 0.0  # before `start_us`, in which it waited on the device for others

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def timeline_of(session: Any, directory: Path) -> Timeline:
    """Record a decode step of a `DecodeSession`, whose state stays as it is."""
    if session.lock.locked():
        return None, "the block ended inside of a step"
    if torch.autograd._profiler_enabled():
        return None, "a profiler was running"
    with session.lock, surroundings(session.device):
        try:
            with decode_step(session) as step:
                kernels, us = _measure(step.run, session.device, directory, warm=3, number=10)
        except NoStep as error:
            return None, str(error)
    about = {
        "kind": step.kind,
        "what": step.what,
        "model": type(session.original).__name__,
        "batch": step.key.in_words(),
        "num_tokens": step.key.num_tokens,
        "num_reqs": step.key.num_reqs,
        "seq_len": step.seq_len,
    }
    return _timeline(about, session.device, kernels, us)


def timeline_of_call(run: Callable[[], object], directory: Path) -> Timeline:
    """Record a call of any function.

    It is called three times on a CPU, eight times on a GPU. A function that uses no GPU has the
    operators of a CPU in its timeline.
    """
    if torch.autograd._profiler_enabled():
        return None, "a profiler was running"
    run()
    devices = [
        torch.device(one) for one in ("cuda", "cpu") if one == "cpu" or torch.cuda.is_available()
    ]
    for device in devices:
        kernels, us = _measure(run, device, directory, warm=1, number=1)
        if kernels:
            break
    kinds = "kernels of a GPU" if device.type == "cuda" else "CPU operators"
    about = {"kind": "profile", "what": f"a call of the function that was given, {kinds}"}
    nobody = dict.fromkeys(("model", "batch", "num_tokens", "num_reqs", "seq_len"))
    return _timeline({**about, **nobody}, device, kernels, us)


def _measure(
    run: Callable[[], object], device: torch.device, directory: Path, *, warm: int, number: int
) -> tuple[list[Kernel], float | None]:
    """The kernels of one run, whose trace is written, and microseconds of a run on a GPU."""
    on_gpu, path = device.type == "cuda", directory / TRACE
    path.parent.mkdir(exist_ok=True)
    for _ in range(warm):
        run()
    run_us = _event_us(run, number) if on_gpu else None
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    kernels = in_turn(kernels_in(path, on_gpu=on_gpu))
    if not kernels:
        path.unlink()
    return kernels, run_us


def _timeline(
    about: dict[str, Any], device: torch.device, kernels: Sequence[Kernel], run_us: float | None
) -> Timeline:
    if not kernels:
        return None, "the profiler saw no kernel"
    bandwidth, source = _bandwidth(device)
    found = {
        **about,
        "device": str(device),
        "replay_us": run_us,
        **times_of(kernels),
        "bandwidth": bandwidth,
        "bandwidth_from": source,
        "trace": TRACE,
        "kernels": [
            {k: v if k == "name" else round(v, 3) for k, v in dataclasses.asdict(one).items()}
            for one in kernels
        ],
    }
    return found, ""


def kernels_in(path: Path, *, on_gpu: bool) -> list[Kernel]:
    """The kernels in a trace file, in the order in which they began; the first begins at 0.

    Of CPU operators, the outermost ones of ATen and of this project.
    """
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    found = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and _counts(event, on_gpu)
    ]
    found.sort(key=lambda kernel: (kernel.start_us, -kernel.us))
    begin = found[0].start_us if found else 0.0
    kernels: list[Kernel] = []
    for one in found:
        if on_gpu or not kernels or one.start_us - begin >= kernels[-1].end_us:
            kernels.append(dataclasses.replace(one, start_us=one.start_us - begin))
    return kernels


def _counts(event: dict[str, Any], on_gpu: bool) -> bool:
    if on_gpu:
        return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    return event.get("cat") == "cpu_op" and event["name"].startswith(("aten::", "attn_ops::"))


def in_turn(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Let each kernel start when those before it have ended."""
    found, end = [], 0.0
    for one in kernels:
        begin = min(max(one.start_us, end), one.end_us)
        end = max(end, one.end_us)
        found.append(Kernel(one.name, begin, one.end_us - begin, begin - one.start_us))
    return found


def times_of(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Time from the first kernel to the last, busy, and idle."""
    idle, end = 0.0, 0.0
    for one in kernels:
        idle += max(0.0, one.start_us - end)
        end = max(end, one.end_us)
    return {"span_us": round(end, 3), "sum_us": round(end - idle, 3), "gap_us": round(idle, 3)}


def _event_us(run: Callable[[], object], number: int) -> float:
    """Microseconds of one run: the median of five times `number` runs after one another."""
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(number):
            run()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end) / number)
    return statistics.median(found)


def _bandwidth(device: torch.device) -> tuple[float | None, str]:
    """Bytes a second, and where they come from."""
    if device.type != "cuda":
        return None, "not measured: no GPU"
    try:
        source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None, "not measured: no memory for a copy"
    us = _event_us(lambda: target.copy_(source), 10)
    size = f"{_COPIED >> 20} MiB"
    return 2 * _COPIED / (us * 1e-6), f"a copy of {size} on this device, bytes read and written"
