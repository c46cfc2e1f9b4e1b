"""Attention inside a captured step of DeepSeek-V2-Lite, beside the operator alone.

step    from the end of the kernel before a layer's attention to the end of its last kernel
alone   the same operator in a graph of its own, one call a layer over distinct caches

A layer's kernels are found in the step by the names and the order that they have alone. Their own
times do not add up: one that is launched early waits for the one before it. Mean of all layers;
medians of replays.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_ops import get_backend
from benchmarks.decode_step import build, filled_graph, our_session
from benchmarks.figures import free
from benchmarks.mla.decode import operator, operators
from benchmarks.mla.inputs import Shape, make_layers
from benchmarks.mla.runs import brief, over_layers, record

Kernel = tuple[str, float]
"""Name, and the moment of its end, microseconds."""


def deepseek_v2_lite(layers: int) -> Any:
    """Config of DeepSeek-V2-Lite with fewer layers; the first has no experts."""
    from transformers import DeepseekV2Config

    from graphs.app.presets import PRESETS

    settings = PRESETS["deepseek-v2-lite"].sizes | {"num_hidden_layers": layers}
    return DeepseekV2Config(**settings)


def kernels_of(replay: Callable[[], object]) -> list[Kernel]:
    """What a replay runs, in the order in which it begins."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.end) for e in events]


def spans_of(kernels: Sequence[Kernel], names: Sequence[str]) -> list[float]:
    """Of every run of kernels with exactly these names, from the end of the kernel before it.

    NaN for one that is the first of all: nothing ended before.
    """
    found, at = [], 0
    while at + len(names) <= len(kernels):
        part = kernels[at : at + len(names)]
        if names and [name for name, _ in part] == list(names):
            found.append(part[-1][1] - kernels[at - 1][1] if at else math.nan)
            at += len(names)
        else:
            at += 1
    return found


def layer_of(kernels: Sequence[Kernel], layers: int) -> list[str]:
    """Names of one layer's kernels where each layer runs the same.

    Raises:
        ValueError: they do not.
    """
    names = [name for name, _ in kernels]
    size = len(names) // layers
    if not size or names != names[:size] * layers:
        raise ValueError(f"each of {layers} layers must run the same kernels, got {len(names)}")
    return names[:size]


def measure_step(
    shape: Shape,
    device: torch.device,
    rounds: int,
    layers: int,
    backends: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """A row a backend: microseconds a layer in the step, alone, and their ratio."""
    rows = []
    for name in backends or operators():
        reasons = get_backend(name).reasons_against(shape.spec, shape.block_size, device)
        try:
            if reasons:
                raise ValueError("; ".join(reasons))
            rows += _measure(name, shape, device, rounds, layers)
        except Exception as error:  # the others can still be measured
            made = make_layers(shape, device, 1)
            rows.append(record(name, made, float("nan"), kind="step", reason=brief(error)))
        free()
    return rows


def _measure(
    name: str, shape: Shape, device: torch.device, rounds: int, layers: int
) -> list[dict[str, Any]]:
    alone = make_layers(shape, device)
    run = over_layers(alone, operator(name)(alone))
    count = len(alone.caches)
    names = layer_of(kernels_of(run), count)
    alone_us = _median([spans_of(kernels_of(run), names) for _ in range(rounds)])
    row = record(f"{name} alone", alone, alone_us, kind="step", kernels=dict.fromkeys(names, 0.0))
    del alone, run
    free()
    torch._dynamo.reset()
    model = build(deepseek_v2_lite(layers), "attn_ops")
    case = (shape.num_reqs, shape.context)
    session = our_session(model, {}, [case], name, shape.block_size)
    captured, graphs = filled_graph(session, *case), session.graphs
    assert graphs is not None, "the session captures"
    found = [spans_of(kernels_of(lambda: graphs.replay(captured)), names) for _ in range(rounds)]
    if any(len(spans) != layers for spans in found):
        raise ValueError(f"a step must run {json.dumps(names)} {layers} times, got {found}")
    inside_us = _median(found)
    inside = {"name": f"{name} in the step", "us": inside_us, "alone_us": alone_us, "kernels": {}}
    return [row, row | inside]


def _median(spans: Sequence[Sequence[float]]) -> float:
    """Of replays, of the mean over layers."""
    return statistics.median(
        statistics.mean(us for us in one if not math.isnan(us)) for one in spans
    )
