"""Latent attention (MLA) on a GPU: `python -m benchmarks.mla WHAT`.

    decode    every backend's operator; with --profile microseconds by kernel
    ways      queries of many rows over a context: the decode way and the prefill way
    chunks    the prefill way of a long context through small workspaces: time, and peak memory
    step      attention in a captured step of DeepSeek-V2-Lite, beside the operator alone

Microseconds a layer, medians of CUDA graphs whose layers outgrow the L2 cache. Decodes are also
given in percent of the measured copy bandwidth (latents and `kv_b_proj` read once), and of a
measured matrix product's rate. Errors are those to the first backend's result.

T rows, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
B block size.
"""

import argparse
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops import CommonAttentionMetadata, backend_names, get_backend
from attn_ops.backends.measure import (
    capture,
    capture_metadata,
    interleaved_us,
    interval_us,
    l2_bytes,
)
from attn_ops.backends.mla import plan as planning
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionSpec, LatentShape
from benchmarks.attention import copy_rate, matmul_rate
from benchmarks.decode_step import build, filled_graph, our_session
from benchmarks.harness import brief, free, origin, parser_of, write

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

L2_BYTES = 50 << 20  # of an H200
MAX_LAYERS = 64

Attend = Callable[[int], torch.Tensor]
"""Attention of one layer, by its index: [T, N, V]."""
Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch of equal requests of one geometry."""

    heads: int
    num_reqs: int
    context: int  # keys of a request, the new ones included
    query_len: int = 1
    kv_cache_dtype: str = "auto"
    block_size: int = 32
    latent: LatentShape = DEEPSEEK

    @property
    def name(self) -> str:
        return f"{self.heads} heads {self.num_reqs}x{self.query_len}x{self.context}"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec.of_latent(
            self.heads, self.latent, torch.bfloat16, kv_cache_dtype=self.kv_cache_dtype
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the latents that a layer reads."""
        item = 2 if KV_CACHE_DTYPES[self.kv_cache_dtype] is None else 1
        return self.num_reqs * self.context * self.latent.cache_width * item

    @property
    def weight_bytes(self) -> int:
        """Bytes of `kv_b_proj`."""
        one = self.latent
        return 2 * self.heads * (one.qk_nope_head_dim + one.v_head_dim) * one.kv_lora_rank

    @property
    def pairs(self) -> int:
        """Query rows times keys that they see, of one head."""
        hidden = self.query_len * (self.query_len - 1) // 2
        return self.num_reqs * (self.query_len * self.context - hidden)

    @property
    def decode_flops(self) -> int:
        """Of both products over the latents."""
        one = self.latent
        return 2 * self.heads * self.pairs * (one.cache_width + one.kv_lora_rank)

    @property
    def prefill_flops(self) -> int:
        """Of both products over up-projected keys, and of the up-projection."""
        one = self.latent
        attend = 2 * self.heads * self.pairs * (one.qk_head_dim + one.v_head_dim)
        return attend + self.num_reqs * self.context * self.weight_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """One batch over several layers, each with a cache, a weight and queries of its own."""

    shape: Shape
    common: CommonAttentionMetadata
    q: list[torch.Tensor]  # each [T, N, P + R]
    caches: list[torch.Tensor]  # each [blocks, B, Lkv + R]
    kv_b: list[torch.Tensor]  # each [N * (P + V), Lkv]
    kv_scale: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    def attend(self, meta: Any) -> Attend:
        """A backend's operator, with its metadata."""
        shape = self.shape
        return lambda layer: torch.ops.attn_ops.mla_attention(
            self.q[layer], self.caches[layer], meta, self.kv_b[layer],
            shape.latent.qk_head_dim**-0.5, v_head_dim=shape.latent.v_head_dim,
            kv_cache_dtype=shape.kv_cache_dtype, kv_scale=self.kv_scale,
        )  # fmt: skip


def make_layers(shape: Shape, device: torch.device, most: int = MAX_LAYERS) -> Layers:
    """Random layers that outgrow the L2 cache three times, in at most half of the memory."""
    count = min(2, most)
    if device.type == "cuda":
        wanted = 3 * max(L2_BYTES, l2_bytes(device))
        room = torch.cuda.mem_get_info(device)[0] // 2 // (shape.kv_bytes + shape.weight_bytes)
        count = max(1, min(most, max(2, -(-wanted // shape.kv_bytes)), room))
    one, generator = shape.latent, torch.Generator(device).manual_seed(0)
    width = -(-shape.context // shape.block_size)
    num_blocks = shape.num_reqs * width + 1
    table = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    common = CommonAttentionMetadata.from_lengths(
        [shape.query_len] * shape.num_reqs, [shape.context] * shape.num_reqs,
        table.int().view(shape.num_reqs, width), shape.block_size, device,
    )  # fmt: skip
    fp8 = KV_CACHE_DTYPES[shape.kv_cache_dtype]

    def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.empty(size, dtype=torch.bfloat16, device=device)
        return x.normal_(0.0, scale, generator=generator)

    def cache() -> torch.Tensor:
        values = randn(num_blocks, shape.block_size, one.cache_width)
        return values if fp8 is None else values.to(fp8).view(torch.uint8)

    rows = shape.num_reqs * shape.query_len
    columns = shape.heads * (one.qk_nope_head_dim + one.v_head_dim)
    return Layers(
        shape, common,
        [randn(rows, shape.heads, one.qk_head_dim) for _ in range(count)],
        [cache() for _ in range(count)],
        [randn(columns, one.kv_lora_rank, scale=one.qk_nope_head_dim**-0.5) for _ in range(count)],
        None if fp8 is None else torch.ones(1, device=device),
    )  # fmt: skip


# -- runs ------------------------------------------------------------------------------------------


def operators() -> list[str]:
    """Latent backends, the oracle excepted."""
    names = [n for n in backend_names() if n not in ("AUTO", "TORCH_MLA")]
    return [n for n in names if get_backend(n).support.latent]


def operator(name: str, layers: Layers) -> Attend:
    """As in a captured step.

    Raises:
        ValueError: the backend does not take the shape, or cannot be captured.
    """
    backend, shape = get_backend(name), layers.shape
    reasons = backend.reasons_against(shape.spec, shape.block_size, layers.device)
    if reasons:
        raise ValueError("; ".join(reasons))
    if not backend.support.cudagraph.takes(layers.common):
        raise ValueError(f"{name} must be captured, got {backend.support.cudagraph.name}")
    builder = backend.builder(backend, [shape.spec], shape.block_size, layers.device)
    return layers.attend(capture_metadata(builder, layers.common))


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
    backend, shape = get_backend(name), layers.shape
    reasons = backend.reasons_against(shape.spec, shape.block_size, layers.device)
    if reasons:
        raise ValueError("; ".join(reasons))
    workspace = MLAWorkspace([shape.spec], num_tokens, layers.device)
    builder: Any = backend.builder
    made = builder(backend, [shape.spec], shape.block_size, layers.device, workspace=workspace)
    with forced(way):
        return layers.attend(made.build(0, layers.common))


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


def layer_us(layers: Layers, runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Median microseconds of one layer, each run right after one more of itself."""

    def interval(run: Run) -> float:
        run()
        return interval_us(run, layers.device)

    times = interleaved_us(runs, rounds, interval)
    return {name: total / len(layers.caches) for name, total in times.items()}


def record(name: str, layers: Layers, us: float, kind: str, **more: Any) -> dict[str, Any]:
    """A row of the JSON output."""
    shape = layers.shape
    return {
        "name": name,
        "kind": kind,
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


def measured(
    layers: Layers,
    makers: Mapping[str, Callable[[], Attend]],
    kind: str,
    rounds: int,
    more: Callable[[str, float, Run], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Rows of all makers in turns; of one that fails, why. `more` gives further fields."""
    runs: dict[str, Run] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    wanted: torch.Tensor | None = None
    for name, make in makers.items():
        try:
            attend = make()
            out = attend(0).float()
            wanted = out if wanted is None else wanted
            errors[name] = ((out - wanted).norm() / wanted.norm()).item()
            runs[name] = over_layers(layers, attend)
        except Exception as error:  # a library's own; the others can still be timed
            failed[name] = brief(error)
            free()
    rows = [
        record(name, layers, us, kind, error=errors[name], **more(name, us, runs[name]))
        for name, us in layer_us(layers, runs, rounds).items()
    ]
    return rows + [record(n, layers, math.nan, kind, reason=why) for n, why in failed.items()]


Rates = dict[str, float]


def measure_decode(
    shape: Shape, device: torch.device, args: argparse.Namespace, rates: Rates
) -> list[dict[str, Any]]:
    """Every operator at one shape."""
    layers = make_layers(shape, device)
    num_bytes = shape.kv_bytes + shape.weight_bytes

    def more(name: str, us: float, run: Run) -> dict[str, Any]:
        return {
            "percent_of_bandwidth": 100 * num_bytes / us * 1e6 / rates["bytes_per_second"],
            "percent_of_matmul": 100 * shape.decode_flops / us * 1e6 / rates["flops_per_second"],
            "kernels": kernel_us(layers, run) if args.profile else {},
        }

    makers = {name: lambda name=name: operator(name, layers) for name in operators()}
    return measured(layers, makers, "decode", args.rounds, more)


def kernel_us(layers: Layers, run: Run, most: int = 4) -> dict[str, float]:
    """Microseconds a layer of the longest kernels, by the first 40 letters of their names."""
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


def measure_ways(
    shape: Shape, device: torch.device, args: argparse.Namespace, rates: Rates
) -> list[dict[str, Any]]:
    """Both ways of every backend at one shape."""
    layers, tokens = make_layers(shape, device, 2), max(shape.context, 1 << 16)

    def more(name: str, us: float, run: Run) -> dict[str, Any]:
        flops = shape.decode_flops if name.endswith("decode") else shape.prefill_flops
        return {"percent_of_matmul": 100 * flops / us * 1e6 / rates["flops_per_second"]}

    makers = {
        f"{name} {way}": lambda name=name, way=way: one_way(name, way, tokens, layers)
        for name in operators()
        for way in ("prefill", "decode")
    }
    return measured(layers, makers, "ways", args.rounds, more)


def measure_chunks(
    shape: Shape, device: torch.device, args: argparse.Namespace, rates: Rates
) -> list[dict[str, Any]]:
    """The prefill way through workspaces from all of the context to an eighth of it, eager."""
    layers, rows = make_layers(shape, device, 1), []
    for name in operators():
        for part in (1, 2, 4, 8):
            num_tokens = -(-shape.context // part // 64) * 64
            label = f"{name} {num_tokens} tokens"
            try:
                run = over_layers(layers, one_way(name, "prefill", num_tokens, layers), False)
                taken = layer_us(layers, {label: run}, args.rounds)[label]
                rows.append(record(label, layers, taken, "chunks", peak_bytes=peak_bytes(run)))
            except Exception as error:  # out of memory, most likely
                rows.append(record(label, layers, math.nan, "chunks", reason=brief(error)))
            free()
    return rows


def peak_bytes(run: Run) -> int:
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
    shape: Shape, device: torch.device, args: argparse.Namespace, rates: Rates
) -> list[dict[str, Any]]:
    """Microseconds a layer, from the end of the kernel before it, in the step and alone.

    A layer's kernels are found in the step by the names and the order that they have alone. Their
    own times do not add up: one that is launched early waits for the one before it.
    """
    rows = []
    for name in args.backends or operators():
        reasons = get_backend(name).reasons_against(shape.spec, shape.block_size, device)
        try:
            if reasons:
                raise ValueError("; ".join(reasons))
            rows += _in_and_alone(name, shape, device, args)
        except Exception as error:  # the others can still be measured
            made = make_layers(shape, device, 1)
            rows.append(record(name, made, math.nan, "step", reason=brief(error)))
        free()
    return rows


def _in_and_alone(
    name: str, shape: Shape, device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    from transformers import DeepseekV2Config

    from graphs.app.presets import PRESETS

    layers = make_layers(shape, device)
    run, count = over_layers(layers, operator(name, layers)), len(layers.caches)
    names = [kernel for kernel, _ in kernels_of(run)]
    names = names[: len(names) // count]
    alone_us = _median([spans_of(kernels_of(run), names) for _ in range(args.rounds)])
    row = record(f"{name} alone", layers, alone_us, "step", kernels=dict.fromkeys(names, 0.0))
    del layers, run
    free()
    torch._dynamo.reset()
    sizes = PRESETS["deepseek-v2-lite"].sizes | {"num_hidden_layers": args.layers}
    model, case = build(DeepseekV2Config(**sizes), "attn_ops"), (shape.num_reqs, shape.context)
    session = our_session(model, {}, [case], name, shape.block_size)
    captured, graphs = filled_graph(session, *case), session.graphs
    assert graphs is not None, "the session captures"
    found = [
        spans_of(kernels_of(lambda: graphs.replay(captured)), names) for _ in range(args.rounds)
    ]
    if any(len(spans) != args.layers for spans in found):
        raise ValueError(f"a step must run {names} {args.layers} times, got {found}")
    inside = {"name": f"{name} in the step", "us": _median(found), "alone_us": alone_us}
    return [row, row | inside | {"kernels": {}}]


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


def shapes(args: argparse.Namespace, heads: int) -> list[Shape]:
    """Of the command line, or the default ones.

    Raises:
        ValueError: one is not of the form.
    """
    found, dtype = [], {"bf16": "auto", "fp8": "fp8_e4m3"}[args.dtype]
    for text in args.shapes or DEFAULTS[args.what]:
        try:
            first, context = (int(part) for part in text.split("x"))
        except ValueError:
            raise ValueError(f"shape must be REQUESTSxCONTEXT, got {text!r}") from None
        rows = (1, context, first) if args.what in ("ways", "chunks") else (first, context)
        shape = Shape(
            heads, *rows, kv_cache_dtype=dtype, block_size=args.block_size,
            latent=LatentShape(*args.sizes),
        )  # fmt: skip
        one = args.what in ("ways", "chunks")
        found.append(shape if one else dataclasses.replace(shape, query_len=args.query_len))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began, device = time.perf_counter(), torch.device(args.device)
    rates = {"bytes_per_second": copy_rate(device), "flops_per_second": matmul_rate(device)}
    free()
    rows: list[dict[str, Any]] = []
    heads = [16] if args.what == "step" else args.heads  # DeepSeek-V2-Lite has 16
    for shape in (shape for n in heads for shape in shapes(args, n)):
        if time.perf_counter() - began > args.seconds:
            print(f"stopped before {shape.name}: --seconds {args.seconds}", flush=True)
            break
        try:
            rows += MEASURES[args.what](shape, device, args, rates)
        except Exception as error:  # out of memory, most likely
            print(f"{shape.name}: {brief(error)}", flush=True)
        free()
        write(args.json, {"rows": rows})  # kept if the time runs out
    seconds = time.perf_counter() - began
    return {"what": args.what, **origin(args), **rates, "rows": rows, "seconds": seconds}


def show(result: dict[str, Any], console: Console) -> None:
    """A table for each shape, fastest first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        keys = ("kind", "kv_cache_dtype", "heads", "num_reqs", "query_len", "context")
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    for key, rows in groups.items():
        table = Table(title=" ".join(map(str, key)))
        for column in ("name", "us", "x best", "% bytes", "% matmul", "error", "GiB", "note"):
            table.add_column(column, justify="left" if column in ("name", "note") else "right")
        rows.sort(key=lambda row: (math.isnan(row["us"]), row["us"]))
        for row in rows:
            values = [(row["us"], 1), (row["us"] / rows[0]["us"], 3)]
            values += [(row.get(k), 1) for k in ("percent_of_bandwidth", "percent_of_matmul")]
            peak = row.get("peak_bytes")
            values += [(row.get("error"), 4), (None if peak is None else peak / 2**30, 2)]
            cells = ("-" if v is None or math.isnan(v) else f"{v:.{n}f}" for v, n in values)
            kernels = (f"{name}: {us:.1f}" for name, us in row.get("kernels", {}).items())
            table.add_row(row["name"], *cells, row.get("reason", "\n".join(kernels)))
        console.print(table)
    rates = result["bytes_per_second"] / 1e12, result["flops_per_second"] / 1e12
    console.print(f"copy {rates[0]:.3f} TB/s, matmul {rates[1]:.1f} TFLOP/s; "
                  f"{result['seconds']:.0f} s, commit {result['commit']}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--shapes", nargs="*", default=[], help="REQUESTSxCONTEXT, or QUERYxKEYS")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--query-len", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=32, help="FLASHMLA takes 64 alone")
    parser.add_argument("--sizes", type=int, nargs=4, default=dataclasses.astuple(DEEPSEEK),
                        metavar=("LKV", "P", "R", "V"))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--layers", type=int, default=4, help="step: of the model")
    parser.add_argument("--backends", nargs="+", help="step: these; default: all")
    parser.add_argument("--profile", action="store_true", help="decode: microseconds by kernel")
    parser.add_argument("--seconds", type=float, default=480.0, help="no new shape after them")
    args = parser.parse_args(arguments)
    result = measure(args)
    show(result, Console(width=160))
    write(args.json, result)


if __name__ == "__main__":
    main()
