"""What each option of a decode step gains: `python -m benchmarks.levers --cases 1x1024 8x1024`.

A model of `benchmarks.shapes`, bf16, merged projections, one process. Every row of LEVERS is a
session of its own over the same weights, measured as `benchmarks.decode_step` measures ours; the
first one is measured again at the end, so that a drift of the clock shows. `kernels` is those of
one replay of the smallest case. `prompt ms` and `prompts ms` are called steps that read 512 tokens,
and 16 times as many. The floor is that of `benchmarks.floor`.
"""

import argparse
import contextlib
import gc
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops.early_launch import launched_in_turn
from attn_ops.integrations.merged import merge_projections
from benchmarks.decode_step import build, filled_graph, our_session, ours_ms
from benchmarks.figures import commit, write
from benchmarks.floor import Shape, Weights, floor_graph, physical_limit_ms
from benchmarks.shapes import MODELS
from benchmarks.timing import copy_bandwidth, median_ms
from graphs import DecodeSession

PROMPT_LEN, MANY_PROMPTS = 512, 16
"""Tokens of a prompt, and prompts of a large step."""

FUSED = {"norm_products": "always", "fused_mlp": "always"}
APART = dict.fromkeys(FUSED, "never")

LEVERS: dict[str, dict[str, Any]] = {
    "in turn": {**APART, "early_launch": "off"},
    "in turn, cuBLAS": {**APART, "early_launch": "off", "skinny_products": "never"},
    "early": APART,
    "early, cuBLAS": {**APART, "skinny_products": "never"},
    "early, combo": {**APART, "combo_kernels": True},
    "early, norm": {**APART, "norm_products": "always"},
    "early, mlp": {**APART, "fused_mlp": "always"},
    "early, norm, mlp": FUSED,
    "early, norm, mlp, combo": {**FUSED, "combo_kernels": True},
    "default": {},
}
"""Options of the compile backend. `combo_kernels` is Inductor's: independent kernels become one."""


def num_kernels(session: DecodeSession, batch: int, context: int) -> int:
    """Kernels of one replay."""
    graphs, captured = session.graphs, filled_graph(session, batch, context)
    assert graphs is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        graphs.replay(captured)
        torch.cuda.synchronize()
    events = [e for e in prof.events() if e.device_type.name == "CUDA"]
    return sum(not e.name.startswith(("Memcpy", "Memset")) for e in events)


def prompt_ms(session: DecodeSession, batch: int, length: int) -> float:
    """Wall time of a step that reads prompts, called: the median of five."""
    times = []
    for turn in range(6):
        firsts = range(turn * batch, (turn + 1) * batch)  # no two prompts share a prefix
        prompts = [[1 + first, *range(2, length + 1)] for first in firsts]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        session.generate(prompts, 1)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def measure_lever(
    model: Any, name: str, cases: list[tuple[int, int]], repeats: int
) -> tuple[dict[str, Any], Any]:
    """A row: milliseconds by case, and the session's caches."""
    options = LEVERS[name]
    begin = time.perf_counter()
    in_turn = options.get("early_launch") == "off"
    with launched_in_turn() if in_turn else contextlib.nullcontext():
        session = our_session(model, options, cases, None)
    row: dict[str, Any] = {"options": options, "seconds": time.perf_counter() - begin}
    row["matches"] = session.compile_record.matches_in_words()
    row["kernels"] = num_kernels(session, *cases[0])
    batch, length = cases[-1][0], min(PROMPT_LEN, cases[-1][1] - 1)
    row["prompt ms"] = prompt_ms(session, 1, length)
    row["prompts ms"] = prompt_ms(session, min(batch, MANY_PROMPTS), length)
    for batch, context in cases:
        times = [ours_ms(session, batch, context) for _ in range(repeats)]
        row[f"{batch}x{context}"] = sorted(times)[len(times) // 2]
    caches = session.cache.tensors
    session.release()
    return row, caches


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = [(int(b), int(c)) for b, c in (case.split("x") for case in args.cases)]
    config = MODELS[args.model](args.layers)
    model = build(config, "attn_ops")
    merge_projections(model)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit(),
        "model": args.model,
        "copy_bytes_per_second": copy_bandwidth(), "rows": {},
    }  # fmt: skip
    caches: Any = None
    for name in [*args.levers, args.levers[0]]:
        caches = None
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        label = f"{name}, again" if name in result["rows"] else name
        try:
            result["rows"][label], caches = measure_lever(model, name, cases, args.repeats)
        except Exception as error:
            result["rows"][label] = {"error": f"{type(error).__name__}: {error}"[:300]}
        write(args.json, result)  # what is measured is kept if the time runs out
    if args.floor and caches is not None:
        del model
        gc.collect()
        torch.cuda.empty_cache()
        shape = Shape.of(config)
        weights, speed = Weights(shape), result["copy_bytes_per_second"]
        graphs = {f"{b}x{c}": floor_graph(shape, weights, caches, b, c) for b, c in cases}
        result["rows"]["floor"] = {case: median_ms(g.replay) for case, g in graphs.items()}
        limits = {f"{b}x{c}": physical_limit_ms(shape, b, c, speed) for b, c in cases}
        result["rows"]["limit"] = limits
    return result


def show(result: dict[str, Any], cases: list[str]) -> None:
    table = Table(title=f"decode step, ms; {result['gpu']}, {result['commit']}")
    over_floor = [f"{case} / floor" for case in cases]
    for column in ("lever", *cases, *over_floor, "prompt ms", "prompts ms", "kernels"):
        table.add_column(column, justify="right")
    rows = result["rows"]
    floor = rows.get("floor", {})
    for name, row in rows.items():
        times = [f"{row[case]:.3f}" if case in row else row.get("error", "") for case in cases]
        over = [f"{row[c] / floor[c]:.3f}" if c in row and c in floor else "" for c in cases]
        prompts = [f"{row[key]:.2f}" if key in row else "" for key in ("prompt ms", "prompts ms")]
        table.add_row(name, *times, *over, *prompts, str(row.get("kernels", "")))
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "8x1024", "64x1024"])
    parser.add_argument("--levers", nargs="+", default=list(LEVERS), choices=LEVERS)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-floor", dest="floor", action="store_false")
    parser.add_argument("--json", default=None, help="write the result here")
    args = parser.parse_args()
    result = measure(args)
    write(args.json, result)
    show(result, args.cases)


if __name__ == "__main__":
    main()
