"""Attention backends through the operator and by hand: `python -m benchmarks.attention`.

A row is a cache and a shape, requests x context or tokens of one prompt; a column is a backend:
median microseconds a layer of torch.ops.attn_ops.attention, in a CUDA graph where the backend
allows it. In brackets the time of its library called by hand (benchmarks/direct.py) over ours, and
eager where there is no graph: the host's time is part of it.

A graph holds as many layers, each with its own queries and cache, as outgrow the L2 cache three
times, and of a decode as many as read 4 GiB, or 64. All runs of a shape take turns, so that a
drifting clock meets them all, and each has one more of itself before it. The limit of a decode is
the measured copy bandwidth (keys and values read once), that of a prompt the rate of a matrix
product (both products over the visible pairs). Results that differ are printed. The last row has
the host's microseconds of an eager call, one decode of 128 tokens, and of the library by hand.
"""

import functools
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

import attn_ops
from attn_ops import AttentionSpec, backend_names, get_backend
from attn_ops.backends.measure import (
    Layers,
    MeasuredShape,
    interleaved_us,
    interval_us,
    l2_bytes,
    make_layers,
    make_step,
    repeat_layers,
)
from benchmarks.direct import DIRECT, Attend
from benchmarks.harness import brief, copy_bandwidth, finish, free, origin, parser_of, write
from graphs.app import bench

CASES = {
    "cuda": ["64x8192", "256x2048", "8x4096", "1x32768", "1x1024", "2048", "8192", "16384"],
    "cpu": ["2x64", "1x16", "32"],
}
CACHES = {"bf16": ("bf16", "auto"), "fp8": ("E4M3 cache", "fp8_e4m3")}
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 16)}  # query heads, kv heads, head size
ROUNDS = {"cuda": 21, "cpu": 5}
HOST_ROUNDS = {"cuda": 40, "cpu": 4}
L2_BYTES = 50 << 20  # of an H200
FLEX_SECONDS = 75
"""FLEX is compiled anew for each shape; once that took so long, it is left out."""

Makers = Mapping[str, Callable[[], tuple[Attend, bool]]]
"""By name: makes attention of one layer, and says whether it can be captured."""


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written."""
    if device.type == "cuda":
        return copy_bandwidth()
    return bench.copy_rate(device)


def matmul_rate(device: torch.device) -> float:
    """Operations per second of a product of bf16 matrices, 8192 on a side."""
    size = 8192 if device.type == "cuda" else 256
    a, b, out = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(3))

    def run() -> None:
        torch.mm(a, b, out=out)

    for _ in range(3):
        run()
    times = sorted(interval_us(run, device) for _ in range(11))
    return 2 * size**3 / times[len(times) // 2] * 1e6


def kv_bytes(shape: MeasuredShape, spec: AttentionSpec) -> int:
    """Bytes of the keys and values that a layer reads."""
    token = torch.empty(spec.cache_shape(1, 1), dtype=spec.cache_dtype, device="meta").nbytes
    return shape.num_reqs * shape.seq_len * token


def limit_us(shape: MeasuredShape, spec: AttentionSpec, rates: tuple[float, float]) -> float:
    """What a layer takes at the rate of a copy if it decodes, of a product if it is a prompt."""
    if shape.query_len == 1:
        return kv_bytes(shape, spec) / rates[0] * 1e6
    queries, keys = shape.query_len, shape.seq_len
    pairs = shape.num_reqs * (queries * keys - queries * (queries - 1) // 2)
    return 4 * spec.head_size * spec.num_heads * pairs / rates[1] * 1e6


def bytes_of_layers(shape: MeasuredShape, spec: AttentionSpec, device: torch.device) -> int:
    """Bytes of caches that outgrow the L2 cache three times, at most half of the free memory.

    Decodes read 4 GiB, which takes more than a millisecond, or 64 layers: in a shorter graph what a
    replay costs once would weigh in. Prefills take that long anyway.
    """
    if device.type != "cuda":
        return 0
    wanted = 3 * max(L2_BYTES, l2_bytes(device))
    if shape.query_len == 1:
        wanted = max(wanted, min(4 << 30, 64 * kv_bytes(shape, spec)))
    return min(wanted, torch.cuda.mem_get_info(device)[0] // 2)


# -- runs ------------------------------------------------------------------------------------------


def usable(
    names: Iterable[str], spec: AttentionSpec, block_size: int, device: torch.device
) -> list[str]:
    """Those that take such a layer; prints what is against the others."""
    against = {n: get_backend(n).reasons_against(spec, block_size, device) for n in names}
    for name, reasons in against.items():
        if reasons:
            print(f"{name}: {'; '.join(reasons)}")
    return [name for name, reasons in against.items() if not reasons]


def captures(name: str, layers: Layers) -> bool:
    on_gpu = layers.common.device.type == "cuda"
    return on_gpu and get_backend(name).support.cudagraph.takes(layers.common)


def by_operator(name: str, layers: Layers) -> tuple[Attend, bool]:
    step = make_step(get_backend(name), layers)
    return lambda layer: layers.attend(step.meta, layer), step.captured


def by_hand(name: str, layers: Layers) -> tuple[Attend, bool]:
    captured = captures(name, layers)
    return DIRECT[name](layers, captured), captured


def after_itself_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a run right behind another of the same.

    Without the first run the same FA3 kernels took 9 to 20 us a graph more behind FLEX than behind
    themselves, with 2 layers as with 45 (one H200, 2026-11-21).
    """
    run()
    return interval_us(run, device)


def layer_us(
    layers: Layers,
    makers: Makers,
    rounds: int,
    *,
    alike: bool = True,
    seconds: dict[str, float] | None = None,
) -> dict[str, float]:
    """Median microseconds of one layer; prints who fails, and of `alike` ones who differs.

    To `seconds` what each takes until it is warm is added, by the first word of its name.
    """
    seconds = {} if seconds is None else seconds
    runs: dict[str, Callable[[], object]] = {}
    device, want = layers.common.device, None
    for name, make in makers.items():
        begin = time.perf_counter()
        try:
            attend, captured = make()
            if alike:
                out = attend(0).float()
                want = out if want is None else want
                difference = ((out.reshape(want.shape) - want).norm() / want.norm()).item()
                if not difference < 0.05:
                    print(f"{name}: differs from the first by {difference:.1%}")
            run = repeat_layers(layers, attend, captured)
            after_itself_us(run, device)
            runs[name] = run
        except Exception as error:  # a library's own; the others can still be timed
            print(f"{name}: {brief(error)}")
            free()
        backend = name.split()[0]
        seconds[backend] = seconds.get(backend, 0.0) + time.perf_counter() - begin
    times = interleaved_us(runs, rounds, lambda run: after_itself_us(run, device))
    return {name: total / len(layers.caches) for name, total in times.items()}


def row_of(layers: Layers, names: Iterable[str], us: Mapping[str, float]) -> dict[str, str]:
    """By backend: microseconds a layer, in brackets by hand / operator, and whether it is eager."""
    row = {}
    for name in (name for name in names if name in us):
        direct = us.get(f"{name} by hand")
        notes = [] if direct is None else [f"{direct / us[name]:.2f}"]
        notes += [] if captures(name, layers) else ["eager"]
        row[name] = f"{us[name]:.1f}" + (f" ({', '.join(notes)})" if notes else "")
    return row


def measure(
    shape: MeasuredShape,
    spec: AttentionSpec,
    names: Sequence[str],
    block_size: int,
    device: torch.device,
    rates: tuple[float, float],
    seconds: dict[str, float] | None = None,
) -> dict[str, str]:
    """All backends at one shape; `seconds`: of `layer_us`."""
    num_bytes = bytes_of_layers(shape, spec, device)
    layers = make_layers(spec, shape.lengths(), block_size, device, num_bytes)
    makers = {}
    for name in names:
        makers[name] = functools.partial(by_operator, name, layers)
        if name in DIRECT:
            makers[f"{name} by hand"] = functools.partial(by_hand, name, layers)
    us = layer_us(layers, makers, ROUNDS[device.type], seconds=seconds)
    row = row_of(layers, names, us)
    if "AUTO" in us:
        row["AUTO, % of limit"] = f"{100 * limit_us(shape, spec, rates) / us['AUTO']:.0f}"
    return row


# -- the host --------------------------------------------------------------------------------------


def host_us(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int, group: int = 50
) -> dict[str, float]:
    """Median microseconds until a call returns, in groups; between groups the queue drains."""

    def interval(run: Callable[[], object]) -> float:
        begin = time.perf_counter_ns()
        for _ in range(group):
            run()
        took = time.perf_counter_ns() - begin
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return took / 1000 / group

    interleaved_us(calls, 1, interval)
    gc.disable()
    try:
        return interleaved_us(calls, rounds, interval)
    finally:
        gc.enable()


def host_cell(name: str, layers: Layers) -> str:
    """Host microseconds of an eager call of the operator, in brackets of the library."""
    device, backend = layers.common.device, get_backend(name)
    builder = backend.builder(backend, [layers.spec], layers.block_size, device)
    meta, q, cache = builder.build(0, layers.common), layers.queries[0], layers.caches[0]
    options = {key: value for key, value in layers.options.items() if value is not None}
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: attn_ops.attention(q, cache, meta, layers.scale, **options)
    }
    if name in DIRECT:
        attend = DIRECT[name](layers, False)
        calls["by hand"] = lambda: attend(0)
    us = host_us(calls, device, HOST_ROUNDS[device.type])
    return f"{us['ours']:.1f}" + (f" (by hand {us['by hand']:.1f})" if "by hand" in us else "")


def host_row(
    names: Sequence[str], spec: AttentionSpec, block_size: int, device: torch.device
) -> dict[str, str]:
    row = {}
    layers = make_layers(spec, ((1,), (128,)), block_size, device, 0)
    for name in names:
        try:
            row[name] = host_cell(name, layers)
        except Exception as error:
            print(f"host, {name}: {brief(error)}")
    return row


# -- the command -----------------------------------------------------------------------------------


def command_of(module: str, arguments: Sequence[str] | None) -> str:
    """The command line, without where its figures go."""
    given = " ".join([f"python -m benchmarks.{module}", *(arguments or sys.argv[1:])])
    return re.sub(r" --(json|commit) \S+", "", given)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--backends", nargs="+", choices=backend_names(), help="default: all")
    parser.add_argument("--shapes", nargs="+", help="REQUESTSxCONTEXT, or TOKENS")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp8"], choices=CACHES)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device, size = torch.device(args.device), args.block_size
    # TORCH is the oracle.
    names = args.backends or [n for n in backend_names() if n != "TORCH" or args.device == "cpu"]
    rates = copy_rate(device), matmul_rate(device)
    seconds: dict[str, float] = {}
    result: dict[str, Any] = {
        "command": command_of("attention", arguments), **origin(args), "block_size": size,
        "heads, kv heads, head size": HEADS[args.device],
        "copy_bytes_per_second": rates[0], "matmul_flops_per_second": rates[1], "rows": {},
    }  # fmt: skip
    for dtype in args.dtypes:
        label, kv_cache_dtype = CACHES[dtype]
        spec = AttentionSpec(*HEADS[args.device], torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
        taken = usable(names, spec, size, device)
        for text in args.shapes or CASES[args.device]:
            key = f"{label}, {text.replace('x', ' x ')}"
            print(key, flush=True)
            free()
            late = seconds.get("FLEX", 0.0) > FLEX_SECONDS
            now = [name for name in taken if not (late and name == "FLEX")]
            try:
                row = measure(bench.shape_of(text), spec, now, size, device, rates, seconds)
                result["rows"][key] = row
            except Exception as error:  # the other shapes can still be measured
                print(brief(error))
            write(args.json, result)  # kept if the time runs out
        if dtype == args.dtypes[0]:
            result["rows"][f"{label}, host us of a call"] = host_row(taken, spec, size, device)
    finish(args, result)


if __name__ == "__main__":
    # Every shape compiles FlexAttention anew, in the backend and by hand; past Dynamo's limit of 8
    # it would silently run uncompiled.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        main()
