"""Attention with quantized output against attention and a quantize kernel: microseconds a layer.

`python -m benchmarks.quantize` on a GPU. Of each scheme and batch:

    bf16      attention by TRITON, not quantized
    fused     `attention_quant`, quantized by TRITON's own kernels where it declares the scheme
    apart     the same with `fuse=False`: attention by TRITON, then our quantize kernel
    inductor  attention by TRITON, then the reference compiled by Inductor: what a model has without
              the pass
    default   attention by the default backend, then Inductor's kernel
    auto      `attention_quant` by the default backend: what a model has with the pass
    merge     two attention states merged; and merged and quantized, apart

Medians; the runs of a batch take turns, each in a CUDA graph over as many layers as outgrow the L2
cache twice.
"""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import attn_ops
from attn_ops import AttentionSpec, get_backend, select_backend
from attn_ops.backends.measure import (
    Layers,
    capture,
    interleaved_us,
    interval_us,
    l2_bytes,
    make_layers,
    make_step,
    repeat_layers,
)
from attn_ops.backends.measure_quant import quantized
from attn_ops.output_quant.quantize import quantize_output, reference_quantize
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant
from benchmarks.attention_cases import Case
from benchmarks.figures import commit

CASES = ["1x1024", "8x1024", "64x1024", "256x1024", "512", "2048", "8192"]
MIN_LAYERS = 16
"""A graph of fewer short kernels would be measured with its launch."""


def form(scheme: str, dtype: torch.dtype) -> OutputQuant:
    """As the libraries have it: torchao's rows round their scale."""
    if scheme == "fp8_row":
        return OutputQuant(scheme, round_scale=True)
    return OutputQuant(scheme, min_amax=1e-4 if "group" in scheme else 0.0)


def runs_of(layers: Layers, scheme: str, default: str) -> dict[str, Callable[[], object]]:
    """What is compared, each over all layers."""
    spec, device = layers.spec, layers.common.device
    how = form(scheme, spec.dtype)
    given = scheme in ("fp8_static", "nvfp4")
    out_scale = torch.tensor([0.01], device=device) if given else None
    triton_step = make_step(get_backend("TRITON"), layers)
    default_step = make_step(get_backend(default), layers)
    compiled = torch.compile(
        lambda x: reference_quantize(x, how, out_scale), fullgraph=True, dynamic=False
    )
    attends: dict[str, Callable[[int], object]] = {
        "bf16": lambda i: layers.attend(triton_step.meta, i),
        "fused": quantized(layers, triton_step, how, out_scale, fuse=True),
        "apart": quantized(layers, triton_step, how, out_scale, fuse=False),
        "inductor": lambda i: compiled(layers.attend(triton_step.meta, i)),
        "default bf16": lambda i: layers.attend(default_step.meta, i),
        "auto": quantized(layers, default_step, how, out_scale, fuse=True),
        "default": lambda i: compiled(layers.attend(default_step.meta, i)),
    }
    return {
        name: repeat_layers(layers, attend, device.type == "cuda")
        for name, attend in attends.items()
    }


def merge_times(case: Case, scheme: str, spec: AttentionSpec, rounds: int) -> dict[str, Any]:
    """Two attention states of a batch's rows made one: plain, quantized at once, and then."""
    device = torch.device("cuda")
    how = form(scheme, spec.dtype)
    given = scheme in ("fp8_static", "nvfp4")
    out_scale = torch.tensor([0.01], device=device) if given else None
    fields = dataclasses.asdict(how) | {"out_scale": out_scale}
    rows = case.shape.num_reqs * case.shape.query_len
    shape = (rows, spec.num_heads, spec.head_size)
    one = 4 * rows * spec.num_heads * spec.head_size
    states = [
        [
            torch.randn(s, device=device, dtype=d)
            for s, d in 2 * ((shape, spec.dtype), (shape[:2], torch.float32))
        ]
        for _ in range(max(MIN_LAYERS, min(2 * l2_bytes(device) // one, 64)))
    ]
    compiled = torch.compile(
        lambda x: reference_quantize(x, how, out_scale), fullgraph=True, dynamic=False
    )
    merges: dict[str, Callable[[list[torch.Tensor]], object]] = {
        "merge": lambda s: attn_ops.merge_attn_states(*s),
        "merge fused": lambda s: attn_ops.merge_attn_states_quant(*s, **fields),
        "merge apart": lambda s: quantize_output(attn_ops.merge_attn_states(*s)[0], how, out_scale),
        "merge inductor": lambda s: compiled(attn_ops.merge_attn_states(*s)[0]),
    }
    runs = {
        name: capture(lambda merge=merge: [merge(s) for s in states])
        for name, merge in merges.items()
    }
    times = interleaved_us(runs, rounds, lambda run: interval_us(run, device))
    return {name: taken / len(states) for name, taken in times.items()}


def measure_case(case: Case, scheme: str, spec: AttentionSpec, rounds: int) -> dict[str, Any]:
    """One batch and scheme."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default = select_backend(spec, block_size=16, device=device).backend.name
    smallest = case.kv_bytes(spec) * (MIN_LAYERS - 1) if device.type == "cuda" else 0
    layers = make_layers(
        spec, case.shape.lengths(), 16, device, max(2 * l2_bytes(device), smallest)
    )
    torch._dynamo.reset()
    runs = runs_of(layers, scheme, default)
    times = interleaved_us(runs, rounds, lambda run: interval_us(run, device))
    count = len(layers.caches)
    row = {name: taken / count for name, taken in times.items()}
    row |= merge_times(case, scheme, spec, rounds) if device.type == "cuda" else {}
    return {"shape": case.name, "scheme": scheme, "backend": default, "layers": count} | row


def table(rows: list[dict[str, Any]]) -> Table:
    names: tuple[str, ...] = (
        "bf16",
        "fused",
        "apart",
        "inductor",
        "default bf16",
        "default",
        "auto",
    )
    merges = tuple(name for name in rows[0] if name.startswith("merge"))
    names += merges
    shown = Table(title="microseconds a layer")
    for column in ("shape", "scheme", *names, "fused / bf16", "inductor / fused", "default / auto"):
        shown.add_column(column, justify="left" if column in ("shape", "scheme") else "right")
    for row in rows:
        ratios = (row["fused"] / row["bf16"], row["inductor"] / row["fused"])
        ratios += (row["default"] / row["auto"],)
        shown.add_row(
            row["shape"], row["scheme"], *(f"{row[name]:.2f}" for name in names),
            *(f"{ratio:.3f}" for ratio in ratios),
        )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shapes", nargs="*", default=CASES, help="REQUESTSxCONTEXT or TOKENS")
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--heads", nargs=3, type=int, default=(32, 8, 128))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_size = args.heads
    spec = AttentionSpec(num_heads, num_kv_heads, head_size, torch.bfloat16)
    rows = []
    for text in args.shapes:
        for scheme in args.schemes:
            rows.append(measure_case(Case.parse(text), scheme, spec, args.rounds))
        Console(width=160).print(table([row for row in rows if row["shape"] == text]))
    report = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
