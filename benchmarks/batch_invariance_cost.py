"""What `batch_invariant=True` costs: `python -m benchmarks.batch_invariance_cost`.

Milliseconds of a captured decode step, and of a prompt from `add` to its first token, of a default
session and of one with the option, one after the other on one model.
"""

import statistics
import time
from typing import Any

import torch

from attn_ops.integrations import transformers as integration
from benchmarks.batch_invariance import built
from benchmarks.decode_step import ours_ms, session_of
from benchmarks.harness import Bar, finish, free, model_of, origin, parser_of
from graphs import DecodeSession

BARS = {"1x1024": 1.07, "8x1024": 1.03, "64x1024": 1.03, "256x1024": 1.05, "64x8192": 1.05,
        "2048": 1.08}  # fmt: skip


def prompt_ms(session: DecodeSession, length: int, repeats: int = 9) -> float:
    """Until the first token, median."""
    times = []
    for _ in range(repeats + 2):
        prompt = torch.randint(0, session.vocab_size, (length,)).tolist()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        session.add(prompt, 1, eos=())
        while session.num_unfinished:
            session.step()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def measured(
    model: torch.nn.Module, cases: list[tuple[int, int]], prompts: list[int], **options: Any
) -> dict[str, float]:
    """By case, milliseconds."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = session_of(compiled, [*cases, *((1, n + 1) for n in prompts)], None, **options)
    found = {f"{batch}x{context}": ours_ms(session, batch, context) for batch, context in cases}
    return found | {str(length): prompt_ms(session, length) for length in prompts}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(BARS), help="BATCHxCONTEXT, or TOKENS")
    parser.add_argument("--merge-projections", action="store_true")
    args = model_of(parser)
    integration.register()
    model = built(args.model, args.layers or 32, args.device)
    cases = [tuple(map(int, one.split("x"))) for one in args.shapes if "x" in one]
    prompts = [int(one) for one in args.shapes if "x" not in one]
    found = []
    for batch_invariant in (False, True):
        options = {
            "batch_invariant": batch_invariant,
            "merge_projections": args.merge_projections,
        }
        found.append(measured(model, cases, prompts, **options))  # pyright: ignore
        free()
    rows = {
        name: {"default": ms, "batch_invariant": found[1][name], "ratio": found[1][name] / ms}
        for name, ms in found[0].items()
    }
    bars = [
        Bar(f"batch_invariant / default: {name}", "<=", BARS[name], row["ratio"]).as_dict()
        for name, row in rows.items()
        if name in BARS
    ]
    command = f"python -m benchmarks.batch_invariance_cost --shapes {' '.join(args.shapes)}"
    note = f"{args.model}, {args.layers or 32} layers; milliseconds of a step or a prompt."
    finish(args, {"command": command, "note": note, **origin(args), "rows": rows, "bars": bars})


if __name__ == "__main__":
    main()
