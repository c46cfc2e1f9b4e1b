"""Latent attention (MLA) on a GPU: `python -m benchmarks.mla WHAT`.

    decode    every backend's operator, requests x context
    ways      queries of many rows over a context: the decode way and the prefill way
    chunks    the prefill way of a long context through small workspaces: milliseconds, and GiB
    step      attention in a captured step of DeepSeek-V2-Lite, beside the operator alone

Microseconds a layer, medians of CUDA graphs; layers of decodes outgrow the L2 cache. All runs of a
shape take turns. Results that differ from those of the first backend are printed.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from attn_ops import AttentionSpec, backend_names, get_backend
from attn_ops.backends.measure import Layers, MeasuredShape, make_layers, repeat_layers
from attn_ops.backends.mla import plan as planning
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import LatentShape
from benchmarks.attention import (
    by_operator,
    bytes_of_layers,
    captures,
    command_of,
    layer_us,
    row_of,
    usable,
)
from benchmarks.decode_step import build, filled_graph, our_session
from benchmarks.direct import Attend
from benchmarks.harness import brief, finish, free, origin, parser_of, write

DEEPSEEK = LatentShape(512, 128, 64, 128)  # of V2 and V3
DEFAULTS = {
    "decode": ["1x1024", "1x8192", "1x65536", "8x4096", "32x2048", "64x1024", "64x8192",
               "128x4096", "256x1024", "256x4096", "32x65536"],
    "ways": [f"{q}x{q + c}" for c in (0, 1024, 4096, 16384, 65536)
             for q in (8, 16, 32, 64, 128, 256, 512, 1024)],
    "chunks": ["512x65536", "4096x65536"],
    "step": ["1x1024", "64x4096", "256x1024"],
}  # fmt: skip
"""REQUESTSxCONTEXT; of ways and chunks QUERYxKEYS of one request."""

Rows = dict[str, dict[str, Any]]


def layers_of(shape: MeasuredShape, spec: AttentionSpec, args: argparse.Namespace) -> Layers:
    """Of decodes as many as outgrow the L2 cache, of others two."""
    device = torch.device(args.device)
    num_bytes = bytes_of_layers(shape, spec, device) if shape.query_len == 1 else 0
    layers = make_layers(spec, shape.lengths(), args.block_size, device, num_bytes)
    for kv_b in layers.weights:  # a softmax that is not all at one key
        kv_b.mul_(args.sizes[1] ** -0.5)
    return layers


def measure_decode(
    shape: MeasuredShape, spec: AttentionSpec, names: list[str], args: argparse.Namespace
) -> Rows:
    layers = layers_of(shape, spec, args)
    if args.device == "cuda":  # planning FLASHINFER_MLA alone compiles CUDA for minutes
        names = [name for name in names if captures(name, layers)]
    makers = {name: functools.partial(by_operator, name, layers) for name in names}
    us = layer_us(layers, makers, args.rounds)
    key = f"{spec.num_heads} heads, {shape.num_reqs} x {shape.seq_len}"
    return {key: row_of(layers, names, us)}


# -- ways and chunks -------------------------------------------------------------------------------


@contextlib.contextmanager
def forced(way: str) -> Iterator[None]:
    """Every request that is planned inside takes one way."""
    before = planning.SHORT_QUERY_LEN, planning.LONG_CONTEXT_QUERY_LEN
    planning.SHORT_QUERY_LEN = 1 << 30 if way == "decode" else 0
    planning.LONG_CONTEXT_QUERY_LEN = 0
    try:
        yield
    finally:
        planning.SHORT_QUERY_LEN, planning.LONG_CONTEXT_QUERY_LEN = before


def one_way(name: str, way: str, num_tokens: int, layers: Layers) -> Attend:
    """A backend's operator, planned for one way and a workspace of `num_tokens`."""
    backend, spec, device = get_backend(name), layers.spec, layers.common.device
    builder: Any = backend.builder
    workspace = MLAWorkspace([spec], num_tokens, device)
    made = builder(backend, [spec], layers.block_size, device, workspace=workspace)
    with forced(way):
        meta = made.build(0, layers.common)
    return lambda layer: layers.attend(meta, layer)


def measure_ways(
    shape: MeasuredShape, spec: AttentionSpec, names: list[str], args: argparse.Namespace
) -> Rows:
    layers, num_tokens = layers_of(shape, spec, args), max(shape.seq_len, 1 << 16)
    makers = {
        f"{name} {way}": lambda name=name, way=way: (
            one_way(name, way, num_tokens, layers),
            args.device == "cuda",
        )
        for name in names
        for way in ("prefill", "decode")
    }
    us = layer_us(layers, makers, args.rounds)
    key = f"{spec.num_heads} heads, {shape.query_len} x {shape.seq_len}"
    return {key: {name: round(time, 1) for name, time in us.items()}}


def measure_chunks(
    shape: MeasuredShape, spec: AttentionSpec, names: list[str], args: argparse.Namespace
) -> Rows:
    """Workspaces from all of the context to an eighth of it, eager."""
    layers, rows = layers_of(shape, spec, args), {}
    for part in (1, 2, 4, 8):
        num_tokens = -(-shape.seq_len // part // 64) * 64
        row = rows[f"{spec.num_heads} heads, {num_tokens} of {shape.seq_len}"] = {}
        for name in names:
            column = f"{shape.query_len} rows: {name}"
            make = functools.cache(functools.partial(one_way, name, "prefill", num_tokens, layers))
            us = layer_us(layers, {column: lambda make=make: (make(), False)}, args.rounds)
            if column in us:
                row[column] = us[column] / 1000
                row[f"{column}, GiB"] = peak_bytes(lambda make=make: make()(0)) / 2**30
    return rows


def peak_bytes(run: Callable[[], object]) -> int:
    """Memory that a call takes beyond what was there before it."""
    if not torch.cuda.is_available():
        return 0
    free()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# -- a whole step ----------------------------------------------------------------------------------

Kernel = tuple[str, float]
"""Name, and the moment of its end, microseconds."""


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


def measure_step(
    shape: MeasuredShape, spec: AttentionSpec, names: list[str], args: argparse.Namespace
) -> Rows:
    """Microseconds a layer, from the end of the kernel before it, in the step and alone.

    A layer's kernels are found in the step by the names and the order that they have alone. Their
    own times do not add up: one that is launched early waits for the one before it.
    """
    rows = {}
    for name in names:
        try:
            alone, inside = alone_and_inside(name, shape, spec, args)
            row = {"alone": alone, "in the step": inside, "ratio": inside / alone}
            rows[f"{shape.num_reqs} x {shape.seq_len}, {name}"] = row
        except Exception as error:  # the others can still be measured
            print(f"{name}: {brief(error)}")
        free()
    return rows


def alone_and_inside(
    name: str, shape: MeasuredShape, spec: AttentionSpec, args: argparse.Namespace
) -> tuple[float, float]:
    from transformers import DeepseekV2Config

    from graphs.app.presets import PRESETS

    layers = layers_of(shape, spec, args)
    if not captures(name, layers):
        raise ValueError("it cannot be captured")
    run, count = repeat_layers(layers, *by_operator(name, layers)), len(layers.caches)
    run()
    kernels = [kernel for kernel, _ in kernels_of(run)]
    kernels = kernels[: len(kernels) // count]
    alone = [spans_of(kernels_of(run), kernels) for _ in range(args.rounds)]
    del layers, run
    free()
    torch._dynamo.reset()
    sizes = PRESETS["deepseek-v2-lite"].sizes | {"num_hidden_layers": args.layers}
    model, case = build(DeepseekV2Config(**sizes), "attn_ops"), (shape.num_reqs, shape.seq_len)
    session = our_session(model, {}, [case], name, args.block_size)
    captured, graphs = filled_graph(session, *case), session.graphs
    assert graphs is not None, "the session captures"
    inside = [
        spans_of(kernels_of(lambda: graphs.replay(captured)), kernels) for _ in range(args.rounds)
    ]
    if any(len(spans) != args.layers for spans in inside):
        raise ValueError(f"a step must run {kernels} {args.layers} times, got {inside}")
    return _median(alone), _median(inside)


def _median(spans: Sequence[Sequence[float]]) -> float:
    """Of replays, of the mean over layers."""
    return statistics.median(
        statistics.mean(us for us in one if not math.isnan(us)) for one in spans
    )


# -- the command -----------------------------------------------------------------------------------

MEASURES = {
    "decode": measure_decode,
    "ways": measure_ways,
    "chunks": measure_chunks,
    "step": measure_step,
}


def shape_of(what: str, text: str) -> MeasuredShape:
    first, context = map(int, text.split("x"))
    if what in ("ways", "chunks"):
        return MeasuredShape(1, first, context)
    return MeasuredShape(first, 1, context)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="step: 16")
    parser.add_argument("--shapes", nargs="+", help="REQUESTSxCONTEXT, or QUERYxKEYS")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs=4, default=dataclasses.astuple(DEEPSEEK),
                        metavar=("LKV", "P", "R", "V"))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--layers", type=int, default=4, help="step: of the model")
    parser.add_argument("--backends", nargs="+", help="default: all but the oracle")
    args = parser.parse_args(arguments)
    latent = [name for name in backend_names() if get_backend(name).support.latent]
    wanted = args.backends or [name for name in latent if name != "TORCH_MLA"]
    rows: Rows = {}
    result = {"command": command_of("mla", arguments), **origin(args), "rows": rows}
    for heads in [16] if args.what == "step" else args.heads:
        spec = AttentionSpec.of_latent(
            heads, LatentShape(*args.sizes), torch.bfloat16,
            kv_cache_dtype={"bf16": "auto", "fp8": "fp8_e4m3"}[args.dtype],
        )  # fmt: skip
        names = usable(wanted, spec, args.block_size, torch.device(args.device))
        for text in args.shapes or DEFAULTS[args.what]:
            print(f"{heads} heads, {text}", flush=True)
            try:
                rows |= MEASURES[args.what](shape_of(args.what, text), spec, names, args)
            except Exception as error:  # the other shapes can still be measured
                print(brief(error))
            free()
            write(args.json, result)  # kept if the time runs out
    finish(args, result)


if __name__ == "__main__":
    main()
