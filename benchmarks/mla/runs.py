"""Runs of all layers, timed against each other; replays of CUDA graphs on a GPU."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_ops.backends.measure import capture, interleaved_us, interval_us
from benchmarks.figures import free
from benchmarks.mla.direct import Attend
from benchmarks.mla.inputs import Layers

Run = Callable[[], object]


def brief(error: BaseException) -> str:
    """An exception as one line of a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def over_layers(layers: Layers, attend: Attend, captured: bool = True) -> Run:
    """`attend` on every layer in turn, as one CUDA graph; warmed up."""

    def run() -> None:
        for layer in range(len(layers.caches)):
            attend(layer)

    found: Run = run
    if captured and layers.device.type == "cuda":
        found = capture(run)
    found()
    interval_us(found, layers.device)
    return found


def prepared(
    layers: Layers,
    candidates: Mapping[str, Callable[[Layers], Attend]],
    wanted: torch.Tensor | None,
) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """Runs by name, relative errors on the first request, and why others do not run.

    Without `wanted` the first candidate's result is that of all.
    """
    runs: dict[str, Run] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, make in candidates.items():
        try:
            attend = make(layers)
            out = attend(0).float()
            wanted = out if wanted is None else wanted
            out = out[: wanted.shape[0]]
            errors[name] = ((out - wanted).norm() / wanted.norm()).item()
            runs[name] = over_layers(layers, attend)
        except Exception as error:  # a library's own; the others can still be timed
            failed[name] = brief(error)
            free()
    return runs, errors, failed


def layer_us(layers: Layers, runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Median microseconds of one layer, each run right behind one more of itself."""

    def interval(run: Run) -> float:
        run()
        return interval_us(run, layers.device)

    times = interleaved_us(runs, rounds, interval)
    return {name: total / len(layers.caches) for name, total in times.items()}


def kernel_us(layers: Layers, run: Run, most: int = 4) -> dict[str, float]:
    """Microseconds a layer of each kernel of a run, by its name's first 40 letters; the longest."""
    if layers.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        taken = event.self_device_time_total / len(layers.caches)
        times[event.key[:40]] = times.get(event.key[:40], 0.0) + taken
    return dict(sorted(times.items(), key=lambda item: -item[1])[:most])


def record(name: str, layers: Layers, us: float, **more: Any) -> dict[str, Any]:
    """A row of the JSON output."""
    shape = layers.shape
    return {
        "name": name,
        "heads": shape.heads,
        "num_reqs": shape.num_reqs,
        "query_len": shape.query_len,
        "context": shape.context,
        "kv_cache_dtype": shape.kv_cache_dtype,
        "block_size": shape.block_size,
        "layers": len(layers.caches),
        "us": us,
        **more,
    }
