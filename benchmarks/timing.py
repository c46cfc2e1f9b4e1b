"""Timing on a GPU: medians of CUDA-event intervals."""

import statistics
from collections.abc import Callable
from typing import Any

import torch


def median_ms(run: Callable[[], object], *, warmup: int = 5, repeats: int = 30) -> float:
    """Median milliseconds of `run`, each repeat timed by its own pair of events."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, which keeps what `run` reads, after one call outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    graph.recorded = run
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms(lambda: target.copy_(source), repeats=10) / 1000)
