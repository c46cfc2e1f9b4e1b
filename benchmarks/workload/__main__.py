"""A whole workload of the Llama-3-8B shape: `python -m benchmarks.workload`.

    wall            seconds from the first request to the last token
    GPU             sum of the device's times of all steps
    idle            share of the time in which the GPU does nothing, in a profile of 300 steps
    launched ahead  launches before the tokens of the last ones were read
    waited for      and those after
    same tokens     share of requests with the tokens of the first session; rounding may change some

512 requests, prompts of 32 to 1,024 tokens, outputs of 16 to 512, at most 256 at a time and 8,192
tokens a step; bf16, random weights, greedy. Beside it Transformers' continuous batching.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.decode_step import build, merged
from benchmarks.harness import finish, free, origin, parser_of, write
from benchmarks.shapes import llama_3_8b, tiny_llama
from benchmarks.workload import ours, theirs
from benchmarks.workload.ours import RUNS
from benchmarks.workload.requests import SMALL, Workload


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One session after the other on one compiled model, then Transformers."""
    on_gpu = args.device == "cuda"
    workload = Workload() if on_gpu else SMALL
    config = llama_3_8b(args.layers) if on_gpu else tiny_llama(args.layers or 2)
    wishes = workload.draw(config.vocab_size)
    rows: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[list[int]]] = {}
    command, note = "python -m benchmarks.workload", f"{config.num_hidden_layers} layers."
    result = {"command": command, "note": note, **origin(args), "rows": rows}
    torch.manual_seed(0)  # both models have the same weights
    model: Any = merged(config, args.device)
    for mode, decode_steps in RUNS:
        if mode not in args.modes:
            continue
        session = ours.make_session(
            model, workload, mode, decode_steps, on_gpu, backend=args.backend,
            batch_invariant=args.batch_invariant,
        )  # fmt: skip
        name = f"{mode}; decode_steps {decode_steps}"
        rows[name], tokens[name] = ours.measure(
            session, wishes, args.rounds, only_wall=args.only_wall
        )
        write(args.json, result)  # kept if the time runs out
        session.release()
        del session
        free()
    del model
    torch._dynamo.reset()
    free()
    if args.transformers:
        torch.manual_seed(0)
        model = build(config, "sdpa", args.device)
        name, row, drawn = theirs.measure(model, workload, wishes, args.rounds)
        rows[name], tokens[name] = row, drawn
    first = next(iter(tokens.values()))
    for name, drawn in tokens.items():
        equal = sum(a == b for a, b in zip(first, drawn, strict=True))
        rows[name]["same tokens"] = equal / len(first)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--layers", type=int, default=None, help="default: 32; 2 on a CPU")
    parser.add_argument("--batch-invariant", action="store_true", help="a row's bits are its own")
    modes = list(dict(RUNS))
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes)
    parser.add_argument("--only-wall", action="store_true", help="no GPU times, no profile")
    parser.add_argument("--rounds", type=int, default=2, help="timed runs, the fastest counts")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    args = parser.parse_args(arguments)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
