"""Latent attention (MLA) on a GPU: `python -m benchmarks.mla WHAT`.

    decode    every kernel over the latents, and whole operators, beside the libraries by hand
    tune      constants of TRITON_MLA's decode kernel, and ranges of keys
    project   constants of its merging kernel
    ways      queries of many rows over a context: the decode way and the prefill way
    chunks    the prefill way of a long context through small workspaces: time, and peak memory
    prompts   attention over up-projected keys: libraries, and constants of TRITON_MLA's kernel
    step      attention in a captured step of DeepSeek-V2-Lite, beside the operator alone

Microseconds a layer, medians of CUDA graphs whose layers outgrow the L2 cache. Decodes are also
given in percent of the measured copy bandwidth (latents read once; whole operators: and
`kv_b_proj`), and of a measured matrix product's rate.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops.metadata import LatentShape
from benchmarks.attention import copy_rate, matmul_rate
from benchmarks.figures import free, origin, parser_of, write
from benchmarks.mla.decode import measure_decode
from benchmarks.mla.inputs import DEEPSEEK, Shape
from benchmarks.mla.prefill import measure_chunks, measure_prompts, measure_ways
from benchmarks.mla.runs import brief
from benchmarks.mla.step import measure_step
from benchmarks.mla.tune import tune_decode, tune_project

DECODES = ["1x1024", "1x8192", "1x65536", "8x4096", "32x2048", "64x1024", "64x8192", "128x4096",
           "256x1024", "256x4096", "32x65536"]  # fmt: skip
TUNED = ["1x1024", "1x16384", "1x65536", "8x4096", "32x4096", "64x1024", "64x8192", "128x4096",
         "256x1024", "256x4096"]  # fmt: skip
PREFILLS: dict[str, list[tuple[int, int]]] = {  # query length and context, of one request
    "ways": [(q, q + c) for c in (0, 1024, 4096, 16384, 65536)
             for q in (8, 16, 32, 64, 128, 256, 512, 1024)],
    "chunks": [(512, 65536), (4096, 65536)],
    "prompts": [(2048, 2048), (8192, 8192), (512, 16384), (64, 16384)],
}  # fmt: skip
STEPS = ["1x1024", "64x4096", "256x1024"]
PROJECTED = ["1x1024", "4x1024", "16x4096", "64x4096", "256x1024"]


def shapes(args: argparse.Namespace, heads: int, default: Sequence[str]) -> list[Shape]:
    """REQUESTSxCONTEXT of the command line, or the default ones.

    Raises:
        ValueError: one is not of that form.
    """
    found = []
    for text in args.shapes or default:
        try:
            num_reqs, context = (int(part) for part in text.split("x"))
        except ValueError:
            raise ValueError(f"shape must be REQUESTSxCONTEXT, got {text!r}") from None
        dtype = {"bf16": "auto", "fp8": "fp8_e4m3"}[args.dtype]
        sizes = (heads, num_reqs, context, args.query_len)
        found.append(Shape(*sizes, dtype, args.block_size, LatentShape(*args.sizes)))
    return found


def untuned(args: argparse.Namespace, heads: int) -> list[Shape]:
    """What is measured shape by shape; of prefills, QUERYxKEYS of one request."""
    if args.what not in PREFILLS:
        return shapes(args, heads, STEPS if args.what == "step" else DECODES)
    default = [f"{q}x{c}" for q, c in PREFILLS[args.what]]
    return [
        dataclasses.replace(shape, num_reqs=1, query_len=shape.num_reqs)
        for shape in shapes(args, heads, default)
    ]


def measure_one(
    args: argparse.Namespace, shape: Shape, device: torch.device, rates: dict[str, float]
) -> list[dict[str, Any]]:
    if args.what == "ways":
        return measure_ways(shape, device, args.rounds, rates)
    if args.what == "chunks":
        return measure_chunks(shape, device, args.rounds)
    if args.what == "step":
        return measure_step(shape, device, args.rounds, args.layers, args.backends)
    if args.what == "prompts":
        return measure_prompts(shape, device, args.rounds, rates, args.flashinfer)
    return measure_decode(shape, device, args.rounds, rates, not args.kernels, args.profile)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began, device = time.perf_counter(), torch.device(args.device)
    rates = {"bytes_per_second": copy_rate(device), "flops_per_second": matmul_rate(device)}
    free()
    rows: list[dict[str, Any]] = []
    for heads in [16] if args.what == "step" else args.heads:  # DeepSeek-V2-Lite has 16
        if args.what == "tune":
            rows += tune_decode(shapes(args, heads, TUNED), device, args.rounds, args.processes)
        elif args.what == "project":
            rows += tune_project(shapes(args, heads, PROJECTED), device, args.rounds)
        else:
            for shape in untuned(args, heads):
                try:
                    rows += measure_one(args, shape, device, rates)
                except Exception as error:  # out of memory, most likely
                    print(f"{shape.name}: {brief(error)}", flush=True)
                free()
                write(args.json, {"rows": rows})  # kept if the time runs out
                if time.perf_counter() - began > args.seconds:
                    print(f"stopped after {shape.name}: --seconds {args.seconds}", flush=True)
                    break
    return {
        "what": args.what,
        **origin(args),
        **rates,
        "rows": rows,
        "seconds": time.perf_counter() - began,
    }


def show(result: dict[str, Any], console: Console, most: int) -> None:
    """A table for each shape, fastest first, at most `most` lines."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        splits = row.get("splits") if row["kind"] == "project" else None
        keys = ("kind", "kv_cache_dtype", "heads", "num_reqs", "query_len", "context")
        groups.setdefault((*(row[k] for k in keys), splits), []).append(row)
    for key, rows in groups.items():
        table = Table(title=" ".join(str(part) for part in key if part is not None))
        columns = ("name", "us", "x best", "% bytes", "% matmul", "error", "splits", "GiB", "note")
        for column in columns:
            table.add_column(column, justify="left" if column in ("name", "note") else "right")
        timed = sorted((r for r in rows if not math.isnan(r["us"])), key=lambda r: r["us"])
        for row in timed[:most] + [r for r in rows if math.isnan(r["us"])][:most]:
            table.add_row(row["name"], *_figures(row, timed), _note(row))
        console.print(table)
    if result["what"] == "tune":
        console.print(_overall(result["rows"]))
    if result["what"] == "ways":
        console.print(_thresholds(result["rows"]))
    rates = result["bytes_per_second"] / 1e12, result["flops_per_second"] / 1e12
    console.print(f"copy {rates[0]:.3f} TB/s, matmul {rates[1]:.1f} TFLOP/s; "
                  f"{result['seconds']:.0f} s, commit {result['commit']}")  # fmt: skip


def _note(row: dict[str, Any]) -> str:
    kernels = (f"{name}: {us:.1f}" for name, us in row.get("kernels", {}).items())
    return "\n".join([row["reason"]] if "reason" in row else kernels)


def _figures(row: dict[str, Any], timed: list[dict[str, Any]]) -> list[str]:
    if math.isnan(row["us"]):
        return ["-"] * 7
    values = [(row["us"], 1), (row["us"] / timed[0]["us"], 3)]
    values += [(row.get(k), 1) for k in ("percent_of_bandwidth", "percent_of_matmul")]
    values += [(row.get("error"), 4), (row.get("splits"), 0)]
    peak = row.get("peak_bytes")
    values.append((None if peak is None else peak / 2**30, 2))
    return ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]


def _overall(rows: list[dict[str, Any]]) -> Table:
    """Forms by their mean and worst time over the best of each shape."""
    best: dict[tuple[int, ...], float] = {}
    forms = [r for r in rows if r["kind"] == "form" and not math.isnan(r["us"])]
    for row in forms:
        shape = (row["heads"], row["num_reqs"], row["context"])
        best[shape] = min(best.get(shape, math.inf), row["us"])
    ratios: dict[tuple[int, str], list[float]] = {}
    for row in forms:
        shape = (row["heads"], row["num_reqs"], row["context"])
        ratios.setdefault((row["heads"], row["name"]), []).append(row["us"] / best[shape])
    table = Table(title="forms over all shapes")
    for column in ("heads", "form", "mean x best", "worst x best"):
        table.add_column(column)
    ordered = sorted(ratios.items(), key=lambda item: (item[0][0], sum(item[1]) / len(item[1])))
    shown: dict[int, int] = {}
    for (heads, name), found in ordered:
        shown[heads] = shown.get(heads, 0) + 1
        if shown[heads] <= 8:
            mean = sum(found) / len(found)
            table.add_row(str(heads), name, f"{mean:.3f}", f"{max(found):.3f}")
    return table


def _thresholds(rows: list[dict[str, Any]]) -> Table:
    """Time of the decode way over that of the prefill way, by context and rows of the query."""
    times = {
        (r["name"].split()[0], r["heads"], r["context"] - r["query_len"], r["query_len"],
         r["name"].split()[1]): r["us"]
        for r in rows if not math.isnan(r["us"])
    }  # fmt: skip
    lines: dict[tuple[str, int, int], dict[int, float]] = {}
    for name, heads, context, query_len, way in times:
        both = [times.get((name, heads, context, query_len, w)) for w in ("decode", "prefill")]
        if way == "decode" and both[0] is not None and both[1] is not None:
            lines.setdefault((name, heads, context), {})[query_len] = both[0] / both[1]
    lengths = sorted({query_len for found in lines.values() for query_len in found})
    table = Table(title="decode way over prefill way: below 1 the decode way is faster")
    for column in ("backend", "heads", "context before", *map(str, lengths)):
        table.add_column(column)
    for key, found in lines.items():
        ratios = (f"{found[n]:.2f}" if n in found else "-" for n in lengths)
        table.add_row(*map(str, key), *ratios)
    return table


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("what", choices=("decode", "tune", "project", "step", *PREFILLS))
    found.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    found.add_argument("--shapes", nargs="*", default=[], help="REQUESTSxCONTEXT, or QUERYxKEYS")
    found.add_argument("--dtype", default="bf16", choices=("bf16", "fp8"))
    found.add_argument("--query-len", type=int, default=1)
    found.add_argument("--block-size", type=int, default=32, help="FlashMLA by hand takes 64 alone")
    found.add_argument("--sizes", type=int, nargs=4, default=dataclasses.astuple(DEEPSEEK),
                       metavar=("LKV", "P", "R", "V"))  # fmt: skip
    found.add_argument("--rounds", type=int, default=11)
    found.add_argument("--layers", type=int, default=4, help="step: of the model")
    found.add_argument("--backends", nargs="+", help="step: these; default: all")
    found.add_argument("--processes", type=int, default=12, help="that compile")
    found.add_argument("--flashinfer", action="store_true", help="prompts: FlashInfer too")
    found.add_argument("--kernels", action="store_true", help="no whole operators")
    found.add_argument("--profile", action="store_true", help="decode: microseconds by kernel")
    found.add_argument("--seconds", type=float, default=480.0, help="no new shape after them")
    found.add_argument("--lines", type=int, default=10, help="of a table")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    result = measure(args)
    show(result, Console(width=160), args.lines)
    write(args.json, result)


if __name__ == "__main__":
    main()
