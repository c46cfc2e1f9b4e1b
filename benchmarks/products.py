"""Products of few rows: `skinny_mm`'s kernel beside cuBLAS: `python -m benchmarks.products`.

Microseconds a product, medians of CUDA graphs over as many weights as outgrow the L2 cache twice,
of the products of a Llama-3-8B-shaped step, at the numbers of rows at which `skinny_mm` launches
its kernel. `limit` is the weight's bytes over the measured copy bandwidth. In FP8 both sides have
a scale a row, and cuBLAS is `torch._scaled_mm`; `fp8 fast` is `use_fast_accum=True`.
"""

import argparse
import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops.backends.measure import interleaved_us, interval_us, l2_bytes
from attn_ops.ops.skinny_constants import most_rows, skinny_constants
from attn_ops.ops.triton.skinny import launch_skinny
from benchmarks.figures import commit
from benchmarks.timing import capture, copy_bandwidth

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    "lm_head": (128256, 4096),
}  # fmt: skip
"""Outputs and inputs."""

LEAST_WEIGHTS = 4


def make(rows: int, m: int, k: int, fp8: bool) -> tuple[torch.Tensor, list[torch.Tensor], Any, Any]:
    """x [rows, k], weights [m, k], and the scales of FP8."""
    device = torch.device("cuda")
    count = max(LEAST_WEIGHTS, 2 * l2_bytes(device) // (m * k * (1 if fp8 else 2)) + 1)
    x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(count)]
    if not fp8:
        return x, weights, None, None
    narrow = torch.float8_e4m3fn
    scales = torch.rand(rows, 1, device=device), torch.rand(1, m, device=device)
    return x.to(narrow), [w.to(narrow) for w in weights], *scales


def measure(
    name: str, rows: int, fp8: bool, fast: bool, rounds: int, bandwidth: float
) -> dict[str, Any] | None:
    """One row of the table; None where `skinny_mm` takes cuBLAS."""
    m, k = SHAPES[name]
    x, weights, x_scale, w_scale = make(rows, m, k, fp8)
    if rows > most_rows(weights[0].t()):
        return None

    def library() -> None:
        for w in weights:
            if fp8:
                torch._scaled_mm(
                    x, w.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
                )
            else:
                torch.mm(x, w.t())

    def ours(prefetch: bool = True) -> None:
        constants = skinny_constants(m, fp8)
        constants = constants if prefetch else constants._replace(prefetch=0)
        for w in weights:
            launch_skinny(x, w.t(), None, x_scale, w_scale, torch.bfloat16, constants, fast)

    ways = {"library": library, "ours": ours, "not ahead": lambda: ours(prefetch=False)}
    runs = {way: capture(call).replay for way, call in ways.items()}
    device = torch.device("cuda")
    times = interleaved_us(runs, rounds, lambda run: interval_us(run, device))
    row = {way: taken / len(weights) for way, taken in times.items()}
    limit = 1e6 * m * k * weights[0].itemsize / bandwidth
    return {
        "product": name,
        "m": m,
        "k": k,
        "rows": rows,
        "fp8": fp8,
        "fast": fast,
        "limit": limit,
    } | row


def _kind(row: dict[str, Any]) -> str:
    """The dtype, and of FP8 which sums."""
    return ("fp8 fast" if row["fast"] else "fp8") if row["fp8"] else "bf16"


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="microseconds a product")
    columns = ("limit", "library", "ours", "not ahead")
    for column in ("product", "M x K", "rows", "dtype", *columns, "library / ours"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["product"], f"{row['m']} x {row['k']}", str(row["rows"]),
            _kind(row), *(f"{row[column]:.2f}" for column in columns),
            f"{row['library'] / row['ours']:.3f}",
        )  # fmt: skip
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", default=None, help="write the result here")
    args = parser.parse_args()
    bandwidth, rows = copy_bandwidth(), []
    for fp8, fast in ((False, False), (True, True), (True, False)):
        for name in args.products:
            if fp8 and name == "lm_head":  # models in FP8 keep theirs in bf16
                continue
            for count in args.rows:
                row = measure(name, count, fp8, fast, args.rounds, bandwidth)
                if row is not None:
                    rows.append(row)
                torch.cuda.empty_cache()
    show(rows)
    if args.json:
        result = {"commit": commit(), "device": torch.cuda.get_device_name(), "rows": rows}
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
