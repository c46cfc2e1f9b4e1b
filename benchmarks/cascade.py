"""Decodes of requests that share a prefix: `python -m benchmarks.cascade`.

    apart      every request has blocks of its own
    shared     all tables name the same blocks of the prefix: plain attention, its keys from L2
    cascade    attention to the prefix once for all rows, to the rest, and both merged

Microseconds a layer, captured, over distinct caches of 200 MB together at least. With `--samples`
also milliseconds a step of a session: so many samples of one prompt, Llama-3-8B shape, with
`share_prefixes`, the prefix attended to apart and not.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, get_backend
from attn_ops.backends.measure import interleaved_us, interval_us
from benchmarks.decode_step import merged
from benchmarks.figures import free, number, origin, parser_of, write
from benchmarks.graphs import tiny_llama
from benchmarks.shapes import llama_3_8b
from benchmarks.timing import capture
from graphs import DecodeSession
from graphs.step import shared as shared_prefixes

CASES = [
    "16x8x1024",
    "32x8x1024",
    "8x512",
    "8x2048",
    "64x512",
    "64x1024",
    "64x2048",
    "64x8192",
    "256x1024",
]
WAYS = ("apart", "shared", "cascade")
OWN_TOKENS = 256
BLOCK_SIZE = 16
STEPS = 64, 192
"""Tokens a sample of the two runs whose times are subtracted."""

LEAST_BYTES = 200 << 20
MOST_BYTES = 40 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups of requests, each with a prefix: `64x1024` is one group of 64, `32x8x1024` are 32."""

    groups: int
    size: int
    shared: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """
        Raises:
            ValueError: the text is not of that form.
        """
        try:
            numbers = [int(part) for part in text.split("x")]
            groups, size, shared = numbers if len(numbers) == 3 else (1, *numbers)
            if min(groups, size, shared) < 1 or shared % BLOCK_SIZE:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"case must be [GROUPSx]REQUESTSxSHARED, shared in blocks of {BLOCK_SIZE}, "
                f"got {text!r}"
            ) from None
        return cls(groups, size, shared)

    @property
    def num_reqs(self) -> int:
        return self.groups * self.size


def table_of(case: Case, own: int, is_shared: bool) -> tuple[torch.Tensor, int]:
    """[S, M] int32, and how many blocks the cache has; block 0 is nobody's."""
    first, rest, num_reqs = case.shared // BLOCK_SIZE, math.ceil(own / BLOCK_SIZE), case.num_reqs
    width = first + rest
    if not is_shared:
        table = 1 + torch.arange(num_reqs * width).view(num_reqs, width)
        return table.int(), num_reqs * width + 1
    prefixes = 1 + torch.arange(case.groups * first).view(case.groups, first)
    behind = 1 + case.groups * first
    own_blocks = behind + torch.arange(num_reqs * rest).view(num_reqs, rest)
    table = torch.cat([prefixes.repeat_interleave(case.size, 0), own_blocks], dim=1)
    return table.int(), behind + num_reqs * rest


def runs_of(
    name: str, spec: AttentionSpec, case: Case, own: int, device: torch.device
) -> dict[str, tuple[Callable[[], object], int]]:
    """Each way over all its layers, and how many layers they are."""
    found = {}
    backend, num_reqs = get_backend(name), case.num_reqs
    item = 2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    for way in WAYS:
        table, num_blocks = table_of(case, own, way != "apart")
        common = CommonAttentionMetadata.from_lengths(
            [1] * num_reqs, [case.shared + own] * num_reqs, table, BLOCK_SIZE, device
        )
        builder = backend.builder(backend, [spec], BLOCK_SIZE, device)
        if way == "cascade":
            lens = torch.full((num_reqs,), case.shared, dtype=torch.int32, device=device)
            starts = torch.arange(case.groups + 1, dtype=torch.int32, device=device) * case.size
            meta = builder.build_cascade(common, lens, starts)
        else:
            meta = builder.build(0, common)
        layers = max(2, math.ceil(LEAST_BYTES / (num_blocks * BLOCK_SIZE * item)))
        if device.type == "cpu":
            layers = 2
        if layers * num_blocks * BLOCK_SIZE * item > MOST_BYTES:
            continue
        shape = (num_blocks, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
        caches = [torch.randn(shape, dtype=spec.dtype, device=device) for _ in range(layers)]
        q = torch.randn(num_reqs, spec.num_heads, spec.head_size, dtype=spec.dtype, device=device)

        def run(q: Any = q, caches: Any = caches, meta: Any = meta) -> None:
            for cache in caches:
                attention(q, cache, meta, spec.head_size**-0.5)

        found[way] = (run, layers)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, rows = torch.device(args.device), []
    on_gpu = args.device == "cuda"
    heads = (32, 8, 128) if on_gpu else (4, 2, 16)
    spec = AttentionSpec(*heads, torch.bfloat16 if on_gpu else torch.float32)
    for text in args.cases:
        case = Case.parse(text)
        for name in args.backends:
            runs = runs_of(name, spec, case, OWN_TOKENS, device)
            calls = {way: run for way, (run, _) in runs.items()}
            if on_gpu:
                calls = {way: capture(run).replay for way, run in calls.items()}
            times = interleaved_us(calls, args.rounds, lambda run: interval_us(run, device))
            us = {way: times[way] / runs[way][1] for way in runs}
            rows.append({"case": text, "backend": name, **us})
            del runs, calls
            free()
            write(args.json, {"rows": rows})
    samples = measure_samples(args)
    return {**origin(args), "own_tokens": OWN_TOKENS, "rows": rows, "samples": samples}


# -- sessions --------------------------------------------------------------------------------------


def measure_samples(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds a step of each case."""
    if not args.samples:
        return []
    on_gpu, rows = args.device == "cuda", []
    model = merged(llama_3_8b(32) if on_gpu else tiny_llama(2), args.device)
    for text in args.samples:
        case = Case.parse(text)
        num_reqs, longest = case.num_reqs, case.shared + STEPS[-1] + 1
        own = STEPS[-1] + 2 * BLOCK_SIZE
        session = DecodeSession(
            model, max_batch_size=num_reqs, max_tokens=longest, share_prefixes=True,
            cache_tokens=case.groups * case.shared + num_reqs * own + 2 * longest,
            capture_sizes=[num_reqs], decode_steps=4, debug=None if on_gpu else "eager_replay",
            max_tokens_per_step=8192, lazy_capture=True,
        )  # fmt: skip
        prompts = [[3 + (i + g) % 50 for i in range(case.shared)] for g in range(case.groups)]
        least = shared_prefixes.LEAST_BYTES
        ms = {}
        for way, limit in (("plain", sys.maxsize), ("apart", least)):
            with mock.patch.object(shared_prefixes, "LEAST_BYTES", limit):
                session.generate(prompts, STEPS[0], n=case.size)
                few, many = (_seconds(session, prompts, steps, case.size) for steps in STEPS)
            ms[way] = 1e3 * (many - few) / (STEPS[1] - STEPS[0])
        rows.append(
            {"case": text, **ms, "graphs": [c.key.in_words() for c in session.graphs or ()]}
        )
        session.release()
        del session
        free()
        write(args.json, {"samples": rows})
    return rows


def _seconds(session: DecodeSession, prompts: list[list[int]], steps: int, number: int) -> float:
    begin = time.perf_counter()
    session.generate(prompts, steps, n=number, eos=())
    return time.perf_counter() - begin


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"decodes behind a shared prefix, us a layer; {result['device']}")
    for column in (
        "[groups x] requests x shared",
        "backend",
        "apart",
        "shared",
        "cascade",
        "shared / cascade",
    ):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        times = [number(row.get(way)) for way in WAYS]
        gain = number(row["shared"] / row["cascade"], 2)
        table.add_row(row["case"], row["backend"], *times, gain)
    console.print(table)
    for row in result["samples"]:
        console.print(f"{row['case']}: {row['plain']:.2f} ms a step, apart {row['apart']:.2f}")


def parser() -> argparse.ArgumentParser:
    found = parser_of(__doc__)
    found.add_argument("--cases", nargs="*", default=CASES, help="[GROUPSx]REQUESTSxSHARED")
    found.add_argument("--backends", nargs="+", default=["AUTO", "FLASH_ATTN", "TRITON"])
    found.add_argument("--rounds", type=int, default=11)
    found.add_argument(
        "--samples", nargs="+", default=[], help="[PROMPTSx]SAMPLESxTOKENS of a prompt"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    result = measure(args)
    show(result, Console(width=120))
    write(args.json, result)


if __name__ == "__main__":
    main()
