"""Attention backends through the operator and by hand: `python -m benchmarks.attention`.

    ours      torch.ops.attn_ops.attention, in a CUDA graph where the backend allows it
    direct    the backend's library called by hand in the same kind of graph (benchmarks/direct.py)
    planned   ours, with the plan's own kernels in the graph, once for all its layers

Microseconds a layer, medians. A graph holds as many layers, each with its own queries and cache, as
outgrow the L2 cache three times, and of a decode as many as read 4 GiB, or 64; ours, direct and the
other backends take turns, and each timed run has one more of itself before it. Decodes are also
given in percent of the measured copy bandwidth (keys and values read once), prefills in percent of
a measured matrix product's rate (both products over the visible pairs). `*` is the backend that
`select_backend` chooses; `q8` quantizes the query too and is no candidate for it. Rows that run
eagerly, operator by operator, are shown but have no bar: the host's time is part of them.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops import AttentionSpec, backend_names, select_backend
from attn_ops.backends.measure import interval_us
from benchmarks.attention_bars import all_bars
from benchmarks.attention_cases import (
    Case,
    Interval,
    Row,
    Setting,
    measure_case,
    measure_overhead,
)
from benchmarks.harness import (
    bar_table,
    copy_bandwidth,
    free,
    number,
    origin,
    parser_of,
    verdicts,
    write,
)
from graphs.app import bench

CASES = {
    "cuda": ["64x8192", "256x2048", "8x4096", "1x32768", "1x1024", "2048", "8192", "16384"],
    "cpu": ["2x64", "1x16", "32"],
}
KV_CACHE_DTYPES = {"bf16": "auto", "fp8": "fp8_e4m3"}
HEADS = {"cuda": (32, 8, 128), "cpu": (4, 2, 16)}  # query heads, kv heads, head size
ROUNDS = {"cuda": (21, 7), "cpu": (5, 2)}  # full, quick
CALLS = {"cuda": (2000, 500), "cpu": (200, 50)}


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


def after_itself_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a run right behind another of the same.

    Without the first run the same FA3 kernels took 9 to 20 us a graph more behind FLEX than behind
    themselves, with 2 layers as with 45 (one H200, 2026-11-21).
    """
    run()
    return interval_us(run, device)


def make_setting(
    args: argparse.Namespace, names: list[str], interval: Interval | None = None
) -> Setting:
    device = torch.device(args.device)
    setting = Setting(
        names=names,
        block_size=args.block_size,
        device=device,
        rounds=ROUNDS[device.type][args.quick],
        interval=interval or (lambda run: after_itself_us(run, device)),
        bytes_per_second=copy_rate(device),
        flops_per_second=matmul_rate(device),
        prepare_seconds=args.prepare_seconds,
    )
    free()
    return setting


def chosen_backends(wanted: Sequence[str], device: torch.device) -> list[str]:
    """All backends; on a GPU without TORCH, the oracle, unless it is asked for.

    Raises:
        ValueError: there is no such backend.
    """
    known = backend_names()
    for name in wanted:
        if name not in known:
            raise ValueError(f"backend must be known, got {name!r}; supported: {', '.join(known)}")
    return list(wanted) or [n for n in known if n != "TORCH" or device.type == "cpu"]


def make_spec(dtype: str, device: torch.device) -> AttentionSpec:
    return AttentionSpec(*HEADS[device.type], torch.bfloat16, kv_cache_dtype=KV_CACHE_DTYPES[dtype])


def selected(spec: AttentionSpec, setting: Setting) -> str | None:
    """The backend that a user gets who asks for none."""
    try:
        selection = select_backend(spec, block_size=setting.block_size, device=setting.device)
    except ValueError:
        return None
    return selection.backend.name


def measure(args: argparse.Namespace, interval: Interval | None = None) -> dict[str, Any]:
    """All figures; `interval` times one run in microseconds, None: the device's clock."""
    began = time.perf_counter()
    torch.manual_seed(0)
    device = torch.device(args.device)
    cases = [Case.parse(text) for text in args.shapes or CASES[device.type]]
    setting = make_setting(args, chosen_backends(args.backends, device), interval)
    rows: list[Row] = []
    overhead: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        spec = make_spec(dtype, device)
        default = selected(spec, setting)
        for case in cases:
            rows += measure_case(case, dtype, spec, default, setting)
            free()
    calls = CALLS[device.type][args.quick]
    spec = make_spec(args.dtypes[0], device)
    for name in setting.names:
        overhead.append(measure_overhead(name, args.dtypes[0], spec, calls, setting))
    bars = all_bars(rows, overhead)
    return {
        **origin(args),
        "cuda": torch.version.cuda,
        "heads, kv heads, head size": HEADS[device.type],
        "block_size": args.block_size,
        "copy_bytes_per_second": setting.bytes_per_second,
        "matmul_flops_per_second": setting.flops_per_second,
        "rows": [dataclasses.asdict(row) for row in rows],
        "overhead": overhead,
        "bars": [bar.as_dict() for bar in bars],
        "prepare_seconds": setting.spent,
        "seconds": time.perf_counter() - began,
    }


def refusals(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Backends that have one and the same reason against every shape."""
    reasons: dict[str, set[str | None]] = {}
    for row in rows:
        reasons.setdefault(row["backend"], set()).add(row["reason"])
    alike = {name: next(iter(found)) for name, found in reasons.items() if len(found) == 1}
    return {name: reason for name, reason in alike.items() if reason is not None}


def row_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One cache dtype: a line for each shape and backend."""
    table = Table(title=title)
    right = ("ours", "direct", "direct / ours", "% of limit", "planned")
    for column in ("shape", "backend", *right, "layers", "note"):
        table.add_column(column, justify="right" if column in right else "left")
    last = None
    for row in rows:
        marks = " *" * row["default"] + " q8" * row["quantizes_query"]
        eager = row["ours_us"] is not None and not row["captured"]
        notes = [
            row["runs"] and f"runs {row['runs']}",
            row["reason"],
            row["direct_reason"] and f"by hand: {row['direct_reason']}",
        ]
        table.add_row(
            row["shape"] if row["shape"] != last else "",
            row["backend"] + marks,
            number(row["ours_us"]),
            number(row["direct_us"]),
            number(row["ratio"], 3),
            number(row["percent"]),
            number(row["planned_us"]),
            f"{row['layers']}{' eager' * eager}" if row["layers"] else "",
            "; ".join(note for note in notes if note),
        )
        last = row["shape"]
    return table


def overhead_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="host time of an eager call, one decode of 128 tokens, microseconds")
    for column in ("backend", "ours", "direct", "ours - direct", "note"):
        table.add_column(column, justify="left" if column in ("backend", "note") else "right")
    for row in rows:
        figures = (number(row.get(k)) for k in ("ours_us", "direct_us", "difference_us"))
        table.add_row(row["backend"], *figures, row.get("reason") or row.get("direct_reason") or "")
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """All tables, and the count of bars."""
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        title = f"{dtype} KV cache, microseconds a layer; {result['device']}"
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        refused = refusals(rows)
        console.print(row_table(title, [r for r in rows if r["backend"] not in refused]))
        if any(row["ours_us"] is not None and not row["captured"] for row in rows):
            console.print('eager: not in a graph, so without a bar "direct / operator"')
        for name, reason in refused.items():
            console.print(f"{name}, {dtype}: {reason}", markup=False, highlight=False)
    console.print(overhead_table(result["overhead"]))
    console.print(bar_table(result["bars"]))
    console.print(
        f"bars: {verdicts(result['bars'])}; "
        f"copy {result['copy_bytes_per_second'] / 1e12:.3f} TB/s, "
        f"matmul {result['matmul_flops_per_second'] / 1e12:.1f} TFLOP/s, "
        f"{result['seconds']:.0f} s, commit {result['commit']}"
    )


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("--backends", nargs="*", default=[], help="names; default: all that apply")
    found.add_argument("--shapes", nargs="*", default=[], help="REQUESTSxCONTEXT, or TOKENS")
    found.add_argument("--dtypes", nargs="+", default=["bf16", "fp8"], choices=KV_CACHE_DTYPES)
    found.add_argument("--block-size", type=int, default=16)
    found.add_argument("--quick", action="store_true", help="fewer repeats")
    found.add_argument(
        "--prepare-seconds", type=float, default=75,
        help="a backend whose shapes took longer to compile is skipped at the rest of them",
    )  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    # Every shape compiles FlexAttention anew, in the backend and by hand; past Dynamo's limit of 8
    # it would silently run uncompiled.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        result = measure(args)
    show(result, Console(width=200))
    write(args.json, result)


if __name__ == "__main__":
    main()
