"""Makes the timeline of a session's decode step; see `graphs.dumps.timeline` for its parts."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_ops import AttentionSpec
from attn_ops.integrations.transformers.layers import cache_index
from attn_ops.integrations.transformers.specs import attention_layers
from fx_passes.naming import runs_in
from graphs.context import surroundings
from graphs.dumps.output_code.groups import group_of
from graphs.dumps.timeline.layers import repeats
from graphs.dumps.timeline.moved import (
    Row,
    note_attention,
    note_kernels,
    note_products,
    note_writes,
)
from graphs.dumps.timeline.step import Measured, NoStep, decode_step
from graphs.dumps.timeline.trace import Kernel, idle_before, in_turn, kernels_in, recorded

TRACE = "timeline/trace.json"
_COPIED = 256 << 20
"""Bytes of the copy that measures bandwidth; several times those of a GPU's L2 cache."""


def timeline_of(
    session: Any, directory: Path, graphs: Sequence[Row]
) -> tuple[dict[str, Any] | None, str]:
    """The timeline and "", or None and why there is none. The trace goes into the directory.

    Args:
        session: a `DecodeSession`; nothing of it changes.
        graphs: {"name", "calls", "num_calls"} of each of its compiled graphs, in order.
    """
    if session.lock._is_owned():
        return None, "the block ended inside of a step"
    if torch.autograd._profiler_enabled():
        return None, "a profiler was running"
    with session.lock, surroundings(session.device):
        try:
            with decode_step(session) as measured:
                (directory / TRACE).parent.mkdir(exist_ok=True)
                return _timeline(session, measured, directory / TRACE, graphs)
        except NoStep as error:
            return None, str(error)


def timeline_of_call(
    run: Callable[[], object], directory: Path
) -> tuple[dict[str, Any] | None, str]:
    """The timeline of a call of any function, and ""; else None and why there is none.

    It is called three times on a CPU, eight times on a GPU. A function that uses no GPU has the
    operators of a CPU in its timeline.
    """
    if torch.autograd._profiler_enabled():
        return None, "a profiler was running"
    path = directory / TRACE
    path.parent.mkdir(exist_ok=True)
    run()
    found = ["cuda"] if torch.cuda.is_available() else []
    for device in map(torch.device, (*found, "cpu")):
        kernels, call_us = _measure(run, device, path, warm=1, number=1)
        if kernels:
            break
    else:
        path.unlink()
        return None, "the profiler saw no kernel"
    rows, _ = rows_of(kernels, 0)
    bandwidth, source = _bandwidth(device)
    nobody = dict.fromkeys(("model", "batch", "num_tokens", "num_reqs", "seq_len"))
    kinds = "kernels of a GPU" if device.type == "cuda" else "CPU operators"
    return {
        "kind": "profile",
        "what": f"a call of the function that was given, {kinds}",
        "device": str(device),
        **nobody,
        "replay_us": call_us,
        **times_of(kernels),
        "bandwidth": bandwidth,
        "bandwidth_from": source,
        "num_layers": 0,
        "notes": [],
        "trace": TRACE,
        "groups": groups_of(rows, bandwidth),
        "kernels": rows,
    }, ""


def _measure(
    run: Callable[[], object], device: torch.device, path: Path, *, warm: int, number: int
) -> tuple[list[Kernel], float | None]:
    """Kernels of one run, whose trace is written, and microseconds of a run on a GPU."""
    on_gpu = device.type == "cuda"
    for _ in range(warm):
        run()
    run_us = _event_us(run, number) if on_gpu else None
    recorded(run, device, path)
    return in_turn(kernels_in(path, on_gpu=on_gpu)), run_us


def _timeline(
    session: Any, measured: Measured, path: Path, graphs: Sequence[Row]
) -> tuple[dict[str, Any] | None, str]:
    device = session.device
    kernels, replay_us = _measure(measured.run, device, path, warm=3, number=10)
    if not kernels:
        path.unlink()
        return None, "the profiler saw no kernel"
    bandwidth, source = _bandwidth(device)
    layers = attention_layers(session.original)
    specs = [session.cache.specs[cache_index(layer)] for layer in layers]
    rows, found = rows_of(kernels, len(specs))
    names = [graph["name"] for graph in graphs]
    graphs = [graph for graph in graphs if runs_in(graph["name"], names, measured.kind)]
    notes = _note_bytes(rows, graphs, specs, measured)
    for row in rows:
        if bandwidth and row["bytes"] is not None and row["us"]:
            row["share"] = row["bytes"] / (row["us"] * 1e-6) / bandwidth
    return {
        "kind": measured.kind,
        "what": measured.what,
        "device": str(device),
        "model": type(session.original).__name__,
        "batch": measured.key.in_words(),
        "num_tokens": measured.key.num_tokens,
        "num_reqs": measured.key.num_reqs,
        "seq_len": measured.seq_len,
        "replay_us": replay_us,
        **times_of(kernels),
        "bandwidth": bandwidth,
        "bandwidth_from": source,
        "num_layers": found,
        "notes": notes,
        "trace": TRACE,
        "groups": groups_of(rows, bandwidth),
        "kernels": rows,
    }, ""


def rows_of(kernels: Sequence[Kernel], num_layers: int) -> tuple[list[Row], int]:
    """A row a kernel, bytes not known yet, and how often the sequence of a layer comes."""
    found = repeats([one.name for one in kernels], num_layers)
    rows = [
        {
            "name": one.name,
            "start_us": round(one.start_us, 3),
            "us": round(one.us, 3),
            "early_us": round(one.early_us, 3),
            "gap_us": round(gap, 3),
            "layer": None if found is None else found.layer_of(place, num_layers),
            "group": group_of(one.name),
            "bytes": None,
            "share": None,
            "detail": "",
        }
        for place, (one, gap) in enumerate(zip(kernels, idle_before(kernels), strict=True))
    ]
    return rows, 0 if found is None else found.number


def times_of(kernels: Sequence[Kernel]) -> dict[str, float]:
    """From the first to the last, busy, and idle."""
    span, idle = max(one.end_us for one in kernels), sum(idle_before(kernels))
    return {
        "span_us": round(span, 3), "sum_us": round(span - idle, 3), "gap_us": round(idle, 3)
    }  # fmt: skip


def groups_of(rows: Sequence[Row], bandwidth: float | None) -> dict[str, dict[str, Any]]:
    """Sums by group, the longest first; bytes and share of the kernels whose bytes are known."""
    groups: dict[str, dict[str, Any]] = {}
    known: dict[str, float] = {}
    for row in rows:
        group = groups.setdefault(
            row["group"], {"us": 0.0, "bytes": 0, "share": None, "num_kernels": 0}
        )
        group["us"] += row["us"]
        group["num_kernels"] += 1
        if row["bytes"] is not None:
            group["bytes"] += row["bytes"]
            known[row["group"]] = known.get(row["group"], 0.0) + row["us"]
    for name, group in groups.items():
        if bandwidth and known.get(name):
            group["share"] = group["bytes"] / (known[name] * 1e-6) / bandwidth
        group["us"] = round(group["us"], 3)
    return dict(sorted(groups.items(), key=lambda item: -item[1]["us"]))


def _note_bytes(
    rows: Sequence[Row],
    graphs: Sequence[Row],
    specs: Sequence[AttentionSpec],
    measured: Measured,
) -> list[str]:
    """Bytes into the rows; for what they are not known."""
    key = measured.key
    products = note_products(rows, graphs, key.num_tokens)
    attention = note_attention(rows, specs, key.num_reqs, measured.seq_len)
    note_kernels(rows, graphs, key.num_tokens)
    note_writes(rows, specs, key.num_reqs)
    notes = [f"bytes of products are not known: {products}"] if products else []
    return notes + ([f"bytes of attention are not known: {attention}"] if attention else [])


def _event_us(run: Callable[[], object], number: int) -> float:
    """Microseconds of one of `number` runs after one another, the median of five times that."""
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
