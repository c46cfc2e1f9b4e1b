"""Kernels of sampling: `python -m benchmarks.sampling`.

Microseconds, medians of CUDA graphs in turns: top-k with top-p together and apart, the largest
logit by our kernels and by PyTorch, and a whole filtered step. Logits are normal times `--scale`,
as wide as a model's at 3; the results of both ways are compared bit by bit.

Predicted for 64 x 128,256 on an H200, before a run: bytes of a pass over float32 logits are 33 MB,
8 us from the L2 cache. amax 12, count 31 (94 instructions a number), bracket 5, narrow 16, gather
14, search 40 (two lists of up to 7,000 numbers, 32 passes of a microsecond): 120 us together, where
161 + 509 were measured. The largest of one row in bf16: 256 KB by 126 programs 3 us, then that of
the chunks 2 us, with an early start 5 us; 14 were measured.
"""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_ops.backends.measure import interleaved_us, interval_us
from benchmarks.figures import commit, write
from benchmarks.timing import capture
from graphs.sampling import FIELDS, sample
from graphs.sampling.argmax import argmax, torch_argmax
from graphs.sampling.params import Sampling
from graphs.sampling.triton.select import thresholds
from graphs.sampling.triton.thresholds import kth_largest, nucleus

VOCABULARY = 128256


def apart(x: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    by_k = kth_largest(x, k)
    return torch.maximum(by_k, nucleus(x, by_k, top_p))


def ways_of(rows: int, scale: float) -> dict[str, dict[str, Any]]:
    """Calls that are timed beside each other, by what they compute."""
    logits = (torch.randn(rows, VOCABULARY, device="cuda") * scale).bfloat16()
    x = logits.float()
    k = torch.full((rows,), 50, dtype=torch.int32, device="cuda")
    whole, p = torch.full_like(k, VOCABULARY), torch.full((rows,), 0.9, device="cuda")
    ones = torch.ones_like(p)
    fields = {n: torch.full((rows,), v, dtype=t).cuda() for n, (t, v) in FIELDS.items()}
    fields["temperature"].fill_(0.8)
    fields["top_k"].fill_(50)
    fields["top_p"].fill_(0.9)
    position = torch.arange(rows, device="cuda")
    found: dict[str, dict[str, Any]] = {}
    for name, args in {
        "top-k 50": (k, ones), "top-p 0.9": (whole, p), "top-k 50, top-p 0.9": (k, p),
    }.items():  # fmt: skip
        found[name] = {
            "ours": lambda args=args: thresholds(x, *args),
            "before": lambda args=args: apart(x, *args),
        }
    found["largest"] = {"ours": lambda: argmax(logits), "before": lambda: torch_argmax(logits)}
    for kind in (Sampling.RANDOM, Sampling.FILTERED):
        name = f"a whole step, {kind.name}"
        found[name] = {"ours": lambda kind=kind: sample(logits, fields, position, kind)}
    return found


def measure(rows: int, scale: float, rounds: int) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    result = []
    for name, ways in ways_of(rows, scale).items():
        outputs = [call() for call in ways.values()]
        equal = all(torch.equal(outputs[0], other) for other in outputs)
        runs = {way: capture(call).replay for way, call in ways.items()}
        times = interleaved_us(runs, rounds, lambda run: interval_us(run, device))
        result.append({"what": name, "rows": rows, "scale": scale, "equal": equal} | times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--scale", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", default=None, help="write the result here")
    args = parser.parse_args()
    rows = [r for n in args.rows for scale in args.scale for r in measure(n, scale, args.rounds)]
    write(args.json, {"commit": commit(), "rows": rows})
    table = Table(title="microseconds")
    for column in ("what", "rows", "scale", "equal", "ours", "before"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = (f"{row[way]:.1f}" if way in row else "" for way in ("ours", "before"))
        table.add_row(row["what"], str(row["rows"]), str(row["scale"]), str(row["equal"]), *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
