"""Caches that are too small for all, and prompts that begin alike: `python -m benchmarks.memory`.

small caches    the requests of `benchmarks.workload` in caches of a part of all their lengths,
                reserved by need and by length: wall time, preemptions, tokens computed again
prefixes        32 groups of 8 prompts, 1,024 tokens of each group the same: prompt tokens a
                second until all first tokens are there, with and without sharing
"""

import argparse
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step import merged
from benchmarks.figures import Bar, bar_table, free, number, origin, parser_of, write
from benchmarks.graphs import tiny_llama
from benchmarks.shapes import llama_3_8b
from benchmarks.workload.__main__ import LAYERS
from benchmarks.workload.ours import make_session, run_all
from benchmarks.workload.requests import SMALL, Wish, Workload, num_output_tokens

PARTS = (1.0, 0.5, 0.25)
"""Of the sum of all lengths."""

SHARING = 2.5
"""Prompt tokens a second with shared prefixes, times those without."""


@dataclasses.dataclass
class Small:
    """One cache."""

    part: float
    cache_tokens: int
    reserve: str
    wall_s: float
    tokens_per_s: float
    num_preemptions: int
    num_recomputed_tokens: int
    same_tokens: float  # share of requests with the tokens of the first row


@dataclasses.dataclass
class Prefixes:
    """One way of computing prompts."""

    shares: bool
    wall_s: float
    prompt_tokens_per_s: float  # found or computed
    found: float  # share of them
    same_tokens: float


def small_rows(
    model: Any, workload: Workload, on_gpu: bool, args: argparse.Namespace
) -> list[Small]:
    wishes = workload.draw(64 if not on_gpu else 128_256)
    lengths = sum(len(w.prompt) + w.num_new for w in wishes)
    rows, first = [], []
    for part in args.parts:
        for reserve in ("need", "length") if part < 1 else ("need",):
            tokens = max(int(lengths * part), workload.max_tokens)
            session = make_session(
                model, workload, "FULL_DECODE_ONLY", 1, on_gpu, cache_tokens=tokens, reserve=reserve
            )
            session.warm_up()
            run_all(session, wishes[: max(4, len(wishes) // 8)])
            runs = []
            for _ in range(args.rounds):
                before = session.report().preemptions
                runs.append((*run_all(session, wishes), before, session.report().preemptions))
            seconds, drawn, before, after = min(runs, key=lambda run: run[0])
            first = first or drawn
            preempted = again = 0
            if before is not None and after is not None:
                preempted = after.num_preemptions - before.num_preemptions
                again = after.num_recomputed_tokens - before.num_recomputed_tokens
            rate = num_output_tokens(wishes) / seconds
            equal = same(first, drawn)
            row = Small(part, tokens, reserve, seconds, rate, preempted, again, equal)
            rows.append(row)
            write(args.json, {"small": [dataclasses.asdict(row) for row in rows]})  # it takes time
            session.release()
            del session
            free()
    return rows


def groups(number: int, size: int, shared: int, own: int, vocab_size: int) -> list[Wish]:
    """Prompts of which every `size` begin with the same `shared` tokens; one token is wanted."""
    rng = random.Random(7)
    wishes = []
    for _ in range(number):
        prefix = [rng.randrange(vocab_size) for _ in range(shared)]
        for _ in range(size):
            wishes.append(Wish(prefix + [rng.randrange(vocab_size) for _ in range(own)], 1))
    return wishes


def prefix_rows(model: Any, on_gpu: bool, rounds: int) -> list[Prefixes]:
    """Every run has prompts that the session has not seen: `forget_prefixes` comes before it."""
    wishes = groups(32, 8, 1024, 32, 128_256) if on_gpu else groups(3, 4, 20, 3, 64)
    longest = max(len(w.prompt) for w in wishes) + 1
    workload = Workload(len(wishes), (1, longest - 1), (1, 1), max_batch_size=256)
    rows, first = [], []
    for shares in (False, True):
        session = make_session(
            model, workload, "FULL_DECODE_ONLY", 1, on_gpu,
            cache_tokens=len(wishes) * longest, share_prefixes=shares,
        )  # fmt: skip
        session.warm_up()
        run_all(session, wishes[:8])
        runs = []
        for _ in range(rounds):
            session.forget_prefixes()
            before = session.report().prefixes
            runs.append((*run_all(session, wishes), before, session.report().prefixes))
        seconds, drawn, before, after = min(runs, key=lambda run: run[0])
        first = first or drawn
        found = 0.0
        if before is not None and after is not None:
            found = after.num_shared_tokens - before.num_shared_tokens
            found /= after.num_prompt_tokens - before.num_prompt_tokens
        rate = sum(len(w.prompt) for w in wishes) / seconds
        rows.append(Prefixes(shares, seconds, rate, found, same(first, drawn)))
        session.release()
        del session
        free()
    return rows


def same(first: list[list[int]], drawn: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(first, drawn, strict=True)) / len(first)


def bars(prefixes: Sequence[Prefixes], whole: bool) -> Iterator[Bar]:
    """`whole` False: nothing counts as measured."""
    without, with_them = prefixes
    faster = with_them.prompt_tokens_per_s / without.prompt_tokens_per_s
    yield Bar("prompt tokens/s with shared prefixes", ">=", SHARING, faster if whole else None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    workload = Workload() if on_gpu else SMALL
    config = llama_3_8b(args.layers) if on_gpu else tiny_llama(args.layers)
    torch.manual_seed(0)
    model = merged(config, args.device)
    small = small_rows(model, workload, on_gpu, args)
    prefixes = prefix_rows(model, on_gpu, args.rounds)
    whole = on_gpu and args.layers == LAYERS
    return {
        **origin(args),
        "layers": args.layers,
        "small": [dataclasses.asdict(row) for row in small],
        "prefixes": [dataclasses.asdict(row) for row in prefixes],
        "bars": [bar.as_dict() for bar in bars(prefixes, whole)],
    }


def show(result: dict[str, Any], console: Console) -> None:
    small = Table(title=f"small caches; {result['device']}")
    for column in ("of all lengths", "tokens", "reserve", "wall, s", "tokens/s", "preempted",
                   "computed again", "same tokens"):  # fmt: skip
        small.add_column(column, justify="right")
    for row in result["small"]:
        small.add_row(
            number(row["part"], 2), f"{row['cache_tokens']:,}", row["reserve"],
            number(row["wall_s"], 2), number(row["tokens_per_s"], 0), str(row["num_preemptions"]),
            f"{row['num_recomputed_tokens']:,}", number(row["same_tokens"], 3),
        )  # fmt: skip
    prefixes = Table(title="prompts that begin alike")
    for column in ("shared", "wall, s", "prompt tokens/s", "found", "same tokens"):
        prefixes.add_column(column, justify="right")
    for row in result["prefixes"]:
        prefixes.add_row(
            str(row["shares"]), number(row["wall_s"], 3), number(row["prompt_tokens_per_s"], 0),
            number(row["found"], 3), number(row["same_tokens"], 3),
        )  # fmt: skip
    for table in (small, prefixes, bar_table(result["bars"])):
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    found = parser_of(__doc__)
    found.add_argument("--layers", type=int, default=None, help="default: 32; 2 on a CPU")
    found.add_argument("--parts", nargs="+", type=float, default=PARTS, help="of all lengths")
    found.add_argument("--rounds", type=int, default=2, help="timed runs, the fastest counts")
    args = found.parse_args(arguments)
    args.layers = args.layers or (LAYERS if args.device == "cuda" else 2)
    result = measure(args)
    show(result, Console(width=160))
    write(args.json, result)


if __name__ == "__main__":
    main()
