"""Attention with quantized output against attention and a quantize kernel: microseconds a layer.

`python -m benchmarks.quantize` on a GPU. Of each scheme and batch:

    bf16      attention by TRITON, not quantized
    fused     `attention_quant`, quantized by TRITON's decode kernel where it declares the scheme
    after     attention by TRITON, then our quantize kernel
    inductor  attention by TRITON, then the reference compiled by Inductor: what a model has without
              the pass
    default   attention by the default backend, then Inductor's kernel
    auto      `attention_quant` by the default backend: what a model has with the pass

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

from attn_ops import AttentionSpec, get_backend, select_backend
from attn_ops.backends.measure import (
    Layers,
    Step,
    interleaved_us,
    interval_us,
    l2_bytes,
    make_layers,
    make_step,
    repeat_layers,
)
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
    return OutputQuant(scheme, min_scale=1e-6 if "group" in scheme else 0.0)


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
    fields = {**dataclasses.asdict(how), "out_scale": out_scale, **layers.options}

    def fused(step: Step, layer: int) -> object:
        q, cache = layers.queries[layer], layers.caches[layer]
        return torch.ops.attn_ops.attention_quant(q, cache, step.meta, layers.scale, **fields)

    attends: dict[str, Callable[[int], object]] = {
        "bf16": lambda i: layers.attend(triton_step.meta, i),
        "fused": lambda i: fused(triton_step, i),
        "after": lambda i: quantize_output(layers.attend(triton_step.meta, i), how, out_scale),
        "inductor": lambda i: compiled(layers.attend(triton_step.meta, i)),
        "default bf16": lambda i: layers.attend(default_step.meta, i),
        "auto": lambda i: fused(default_step, i),
        "default": lambda i: compiled(layers.attend(default_step.meta, i)),
    }
    return {
        name: repeat_layers(layers, attend, device.type == "cuda")
        for name, attend in attends.items()
    }


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
    return {"shape": case.name, "scheme": scheme, "backend": default, "layers": count} | row


def table(rows: list[dict[str, Any]]) -> Table:
    names: tuple[str, ...] = (
        "bf16",
        "fused",
        "after",
        "inductor",
        "default bf16",
        "default",
        "auto",
    )
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
