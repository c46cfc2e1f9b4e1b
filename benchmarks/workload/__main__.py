"""A whole workload of the Llama-3-8B shape: `python -m benchmarks.workload`.

    wall       seconds from the first request to the last token
    GPU        sum of the device's times of all steps
    idle       share of the time in which the GPU does nothing, from a profile of 300 steps
    ahead      launches before the tokens of the last ones were read, and those after

512 requests, prompts of 32 to 1,024 tokens, outputs of 16 to 512, at most 256 at a time and 8,192
tokens a step; bf16, random weights, greedy. Beside it Transformers' continuous batching.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step import build, merged
from benchmarks.harness import free, number, origin, parser_of, write
from benchmarks.shapes import llama_3_8b, tiny_llama
from benchmarks.workload import ours, theirs
from benchmarks.workload.ours import RUNS, Ours
from benchmarks.workload.requests import SMALL, Wish, Workload, num_output_tokens
from benchmarks.workload.theirs import Theirs

LAYERS = 32


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began, on_gpu = time.perf_counter(), args.device == "cuda"
    workload = Workload() if on_gpu else SMALL
    if args.requests:
        workload = dataclasses.replace(workload, num_requests=args.requests)
    config = llama_3_8b(args.layers) if on_gpu else tiny_llama(args.layers)
    wishes = workload.draw(config.vocab_size)
    rows = our_rows(config, workload, wishes, args)
    other = their_row(config, workload, wishes, args) if args.transformers else None
    compare_tokens(rows, other)
    return {
        **origin(args),
        "layers": args.layers,
        "workload": dataclasses.asdict(workload),
        "num_output_tokens": num_output_tokens(wishes),
        "rows": [row_fields(row) for row in rows],
        "transformers": None if other is None else without_tokens(other),
        "seconds": time.perf_counter() - began,
    }


def our_rows(
    config: Any, workload: Workload, wishes: list[Wish], args: argparse.Namespace
) -> list[Ours]:
    """One session after the other on one compiled model."""
    on_gpu = args.device == "cuda"
    torch.manual_seed(0)  # both models have the same weights
    model = merged(config, args.device)
    rows = []
    for mode, decode_steps in RUNS:
        if args.modes and mode not in args.modes:
            continue
        session = ours.make_session(
            model, workload, mode, decode_steps, on_gpu, backend=args.backend,
            batch_invariant=args.batch_invariant,
        )  # fmt: skip
        row = ours.measure(session, wishes, args.rounds, only_wall=args.only_wall)
        rows.append(dataclasses.replace(row, mode=mode))  # "auto" is resolved in the session
        write(args.json, {"rows": [row_fields(row) for row in rows]})  # kept if the time runs out
        if args.report:
            print(session.report())
        session.release()
        del session
        free()
    del model
    torch._dynamo.reset()
    free()
    return rows


def their_row(
    config: Any, workload: Workload, wishes: list[Wish], args: argparse.Namespace
) -> Theirs:
    torch.manual_seed(0)
    model: Any = build(config, "sdpa", args.device)
    try:
        return theirs.measure(model, workload, wishes, args.rounds)
    finally:
        del model
        free()


def compare_tokens(rows: list[Ours], other: Theirs | None) -> None:
    """Shares of requests whose tokens are those of the first session; rounding may change some."""
    for one in [*rows, *([other] if other else [])]:
        pairs = list(zip(rows[0].tokens, one.tokens, strict=True)) if rows else []
        if pairs:
            one.same_tokens = sum(a == b for a, b in pairs) / len(pairs)


def without_tokens(row: Ours | Theirs) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    del fields["tokens"]
    return fields


def row_fields(row: Ours) -> dict[str, Any]:
    """What was measured, and what follows from it."""
    fields = without_tokens(row)
    fields["over_gpu"] = row.over_gpu
    fields["idle_share"] = None if row.idle is None else row.idle.share
    for fields_of, kind in zip(fields["kinds"], row.kinds, strict=True):
        fields_of["ms_per_step"] = kind.ms_per_step
    return fields


# -- for people ------------------------------------------------------------------------------------


def row_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['num_output_tokens']:,} output tokens; {result['device']}")
    table.add_column("mode")
    names = ("steps", "wall, s", "tokens/s", "GPU, s", "wall / GPU", "idle", "gaps > 200 us")
    for column in (*names, "ahead", "waited", "same tokens"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        idle, launches = row["idle"], row["num_launches"]
        table.add_row(
            row["mode"], str(row["decode_steps"]), number(row["wall_s"], 2),
            number(row["tokens_per_s"], 0), number(row["gpu_s"], 2), number(row["over_gpu"], 3),
            number(row["idle_share"], 4), "" if idle is None else str(idle["num_long"]),
            str(launches["ahead"]), str(launches["waited"]), number(row["same_tokens"], 3),
        )  # fmt: skip
    other = result["transformers"]
    if other is not None:
        name, rate = f"Transformers, {other['attention']}", number(other["tokens_per_s"], 0)
        same = number(other["same_tokens"], 3)
        table.add_row(name, "", number(other["wall_s"], 2), rate, *[""] * 6, same)
    return table


def kind_table(result: dict[str, Any]) -> Table:
    table = Table(title="steps by kind, times of the device")
    table.add_column("mode")
    table.add_column("kind")
    for column in ("decode_steps", "launches", "ahead", "steps", "tokens", "s", "ms a step"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        for kind in row["kinds"]:
            table.add_row(
                row["mode"], kind["kind"], str(row["decode_steps"]), str(kind["num_launches"]),
                str(kind["num_ahead"]), str(kind["num_steps"]), f"{kind['num_tokens']:,}",
                number(kind["ms"] / 1e3, 2), number(kind["ms_per_step"], 3),
            )  # fmt: skip
    return table


def show(result: dict[str, Any], console: Console) -> None:
    console.print(row_table(result))
    console.print(kind_table(result))
    console.print(f"{result['seconds']:.0f} s, commit {result['commit']}")


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("--backend", default=None)
    found.add_argument("--layers", type=int, default=None, help="default: 32; 2 on a CPU")
    found.add_argument("--requests", type=int, default=None, help="fewer of them")
    found.add_argument("--batch-invariant", action="store_true", help="a row's bits are its own")
    found.add_argument("--modes", nargs="+", default=None, help="default: all")
    found.add_argument("--only-wall", action="store_true", help="no GPU times, no profile")
    found.add_argument("--rounds", type=int, default=2, help="timed runs, the fastest counts")
    found.add_argument("--no-transformers", dest="transformers", action="store_false")
    found.add_argument("--report", action="store_true", help="print the report of every session")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    args.layers = args.layers or (LAYERS if args.device == "cuda" else 2)
    result = measure(args)
    show(result, Console(width=200))
    write(args.json, result)


if __name__ == "__main__":
    main()
