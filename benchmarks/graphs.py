"""Captured decode steps of the Llama-3-8B shape: `python -m benchmarks.graphs`.

    floor      products by cuBLAS and attention by FA3, in one CUDA graph (benchmarks/floor.py)
    replay     our graph alone, one replay behind the other
    per token  wall time through `DecodeSession.step`
    gap        per token - replay
    host       wall time without the host's waits for tokens

bf16, random weights, merged projections; requests of 1024 tokens, of which all but the last are
taken for computed. In parentheses: what was predicted before the first run.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops.backends.flash_attn import fa_version
from benchmarks.decode_step import merged
from benchmarks.floor import Shape, Weights, floor_graph
from benchmarks.graphs_bars import (
    CONTEXT,
    LAYERS,
    PREDICTED_CAPTURES,
    PREDICTED_CHECK_US,
    all_bars,
    predicted,
)
from benchmarks.graphs_steps import (
    Captures,
    Lengths,
    Row,
    address_check_us,
    capture_all,
    measure_case,
)
from benchmarks.harness import (
    bar_table,
    free,
    median_ms,
    number,
    origin,
    parser_of,
    verdicts,
    write,
)
from benchmarks.shapes import llama_3_8b, tiny_llama
from graphs import DecodeSession

RUNS = [("FULL_DECODE_ONLY", 8), ("FULL_DECODE_ONLY", 4), ("FULL_DECODE_ONLY", 1), ("PIECEWISE", 1)]
"""Modes and decode steps of the sessions."""
ALL_SIZES = ("FULL_DECODE_ONLY", 1)
"""Captures the default sizes. Not the first session, whose captures compile kernels."""


def make_session(
    model: Any, mode: str, decode_steps: int, args: argparse.Namespace, lengths: Lengths
) -> DecodeSession:
    """Caches and tables have the same shapes in all sessions, which share what is compiled."""
    batches, on_gpu = args.cases, args.device == "cuda"
    return DecodeSession(
        model,
        max_batch_size=max(batches),
        max_tokens=lengths.longest(max(steps for _, steps in RUNS)),
        cudagraph_mode=mode,
        backend=args.backend,
        max_tokens_per_step=max(2048, max(batches)),
        capture_sizes=None if (mode, decode_steps) == ALL_SIZES else batches,
        mixed_capture_sizes=[],
        decode_steps=decode_steps,
        debug=None if on_gpu else "eager_replay",
        strict=True,
        lazy_capture=True,
    )


@dataclasses.dataclass
class Figures:
    """Of all sessions."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    captures: list[Captures] = dataclasses.field(default_factory=list)
    left_bytes: list[int] = dataclasses.field(default_factory=list)  # after each session
    address_check_us: dict[str, float] = dataclasses.field(default_factory=dict)
    num_addresses: int = 0
    backend: str = ""


def measure_session(session: DecodeSession, batches: Sequence[int], lengths: Lengths) -> Figures:
    """Captures first, then every batch."""
    for cache in session.cache.tensors:
        cache[1:].normal_()
    figures = Figures(captures=[capture_all(session)])
    figures.backend = session.backend_selection.backend.name
    figures.rows = [measure_case(session, batch, lengths) for batch in batches]
    for name, weights in (("without weights", False), ("with weights", True)):
        figures.address_check_us[name] = address_check_us(session, batches[-1], weights=weights)
    assert session.graphs is not None
    captured = next(iter(session.graphs))
    figures.num_addresses = len(captured.book) + len(captured.weights)
    return figures


def measure_sessions(model: Any, args: argparse.Namespace, lengths: Lengths) -> Figures:
    """One session after the other on one compiled model; the memory of each is given back."""
    found = Figures()
    for mode, decode_steps in RUNS:
        session = make_session(model, mode, decode_steps, args, lengths)
        one = measure_session(session, args.cases, lengths)
        found.rows += one.rows
        found.captures += one.captures
        if (mode, decode_steps) == ALL_SIZES:
            found.address_check_us = one.address_check_us
            found.num_addresses = one.num_addresses
            found.backend = one.backend
        session.release()
        del session
        free()
        found.left_bytes.append(torch.cuda.memory_allocated() if args.device == "cuda" else 0)
    return found


def floors_ms(config: Any, batches: Sequence[int], context: int) -> dict[int, float]:
    """By batch; on caches of its own, because the sessions' are gone."""
    shape = Shape.of(config)
    blocks = max(batches) * -(-context // 16) + 1
    caches = [
        torch.randn(
            blocks, 2, 16, shape.kv_heads, shape.head_size, device="cuda", dtype=torch.bfloat16
        )
        for _ in range(shape.layers)
    ]
    weights = Weights(shape)
    return {
        batch: median_ms(floor_graph(shape, weights, caches, batch, context).replay)
        for batch in batches
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began, on_gpu = time.perf_counter(), args.device == "cuda"
    quick = {"warm": 8, "timed": 16, "repeats": 8, "rounds": 2}
    lengths = Lengths(args.context, **(quick if args.quick else {}))
    config = llama_3_8b(args.layers) if on_gpu else tiny_llama(args.layers)
    model = merged(config, args.device)
    figures = measure_sessions(model, args, lengths)
    del model
    torch._dynamo.reset()
    free()
    if on_gpu and args.floor:
        floors = floors_ms(config, args.cases, args.context)
        for row in figures.rows:
            row.floor_ms = floors[row.batch]
    is_bar = on_gpu and (args.layers, args.context) == (LAYERS, CONTEXT) and not args.quick
    bars = all_bars(figures.rows, figures.captures, figures.address_check_us, is_bar)
    return {
        **origin(args),
        "layers": args.layers,
        "lengths": dataclasses.asdict(lengths),
        "backend": figures.backend,
        "rows": [row_fields(row, is_bar) for row in figures.rows],
        "captures": [dataclasses.asdict(c) for c in figures.captures],
        "left_bytes": figures.left_bytes,
        "address_check_us": figures.address_check_us,
        "num_addresses": figures.num_addresses,
        "bars": [bar.as_dict() for bar in bars],
        "seconds": time.perf_counter() - began,
    }


def row_fields(row: Row, is_bar: bool) -> dict[str, Any]:
    """What was measured, what follows from it, and what was predicted where that applies."""
    derived = ("gap_us", "over_replay", "over_floor", "busy")
    fields = dataclasses.asdict(row) | {name: getattr(row, name) for name in derived}
    return fields | {"predicted": predicted(row) if is_bar else {}}


COLUMNS = [
    ("floor", "floor_ms", 3),
    ("replay", "replay_ms", 3),
    ("replay / floor", "over_floor", 3),
    ("per token", "wall_ms", 3),
    ("per token / replay", "over_replay", 4),
    ("gap, us", "gap_us", 0),
    ("host, us", "host_us", 0),
    ("host busy", "busy", 3),
]
"""Heading, field and digits."""


def row_table(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"decode steps, ms, of {result['lengths']['context']} tokens; {result['device']}, "
        f"backend {result['backend']}, {result['layers']} layers"
    )
    table.add_column("mode")
    for column in ("batch", "steps", *(name for name, *_ in COLUMNS)):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        cells = []
        for _, name, digits in COLUMNS:
            guess = row["predicted"].get(name)
            text = number(row[name], digits)
            cells.append(text if guess is None else f"{text} ({guess:.{digits}f})")
        table.add_row(row["mode"], str(row["batch"]), str(row["decode_steps"]), *cells)
    return table


def capture_table(result: dict[str, Any]) -> Table:
    table = Table(title="captures, one session after the other")
    table.add_column("mode")
    columns = ("steps", "graphs", "seconds", "pool, GiB", "device, GiB", "compile, s", "compiled")
    for column in columns:
        table.add_column(column, justify="right")
    for one in result["captures"]:
        taken = one["device_bytes"]
        table.add_row(
            one["mode"], str(one["decode_steps"]), str(one["num_graphs"]),
            number(one["seconds"], 2), number(one["pool_bytes"] / 2**30, 3),
            number(None if taken is None else taken / 2**30, 3),
            number(one["compile_seconds"]), str(one["num_compiled"]),
        )  # fmt: skip
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """All tables, and the count of bars."""
    console.print(row_table(result))
    console.print("FULL runs decode steps by the same graphs as FULL_DECODE_ONLY.")
    console.print(capture_table(result))
    guess = PREDICTED_CAPTURES
    console.print(
        f"predicted for 35: {guess['seconds']:g} s, {guess['GiB']:g} GiB; for the check of "
        f"{result['num_addresses']} addresses, weights included, {PREDICTED_CHECK_US:g} us. "
        "The first replay of a launch looks for moved weights too; with 1 step that is each.",
        highlight=False,
    )
    console.print(bar_table(result["bars"]))
    counts = verdicts(result["bars"])
    console.print(f"bars: {counts}; {result['seconds']:.0f} s, commit {result['commit']}")


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("--backend", default=None)
    found.add_argument("--layers", type=int, default=None, help="default: 32; 2 with --quick")
    found.add_argument("--cases", nargs="+", type=int, default=[1, 8, 64, 256], help="batches")
    found.add_argument("--context", type=int, default=CONTEXT)
    found.add_argument("--no-floor", dest="floor", action="store_false")
    found.add_argument("--quick", action="store_true", help="few layers and tokens; no bars")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    args.layers = args.layers or (2 if args.quick else LAYERS)
    args.cases = sorted(set(args.cases))
    floor = args.floor and args.device == "cuda"
    if floor and fa_version() is None:
        raise SystemExit("the floor needs vllm_flash_attn; without it: --no-floor")
    result = measure(args)
    show(result, Console(width=200))
    write(args.json, result)


if __name__ == "__main__":
    main()
