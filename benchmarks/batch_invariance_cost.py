"""What `batch_invariant=True` costs: `python -m benchmarks.batch_invariance_cost`.

Milliseconds of a captured decode step, and of a prompt from `add` to its first token, of a default
session and of one with the option, one after the other on one model.
"""

from typing import Any

import torch

from benchmarks.batch_invariance import built
from benchmarks.decode_step import ours_ms, session_of
from benchmarks.harness import finish, free, model_of, origin, parser_of, wall_ms
from graphs import DecodeSession


def prompt_ms(session: DecodeSession, length: int, repeats: int = 9) -> float:
    """Until the first token, median; each prompt is another one."""
    prompts = torch.randint(0, session.vocab_size, (repeats + 2, length)).tolist()

    def run() -> None:
        session.add(prompts.pop(), 1, eos=())
        while session.num_unfinished:
            session.step()

    return wall_ms(run, repeats=repeats)


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
    shapes = ["1x1024", "8x1024", "64x1024", "256x1024", "64x8192", "2048"]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="BATCHxCONTEXT, or TOKENS")
    args = model_of(parser)
    model = built(args.model, args.layers or 32, args.device)
    cases = [tuple(map(int, one.split("x"))) for one in args.shapes if "x" in one]
    prompts = [int(one) for one in args.shapes if "x" not in one]
    found = []
    for batch_invariant in (False, True):
        found.append(measured(model, cases, prompts, batch_invariant=batch_invariant))
        free()
    rows = {
        name: {"default": ms, "batch_invariant": found[1][name], "ratio": found[1][name] / ms}
        for name, ms in found[0].items()
    }
    command = f"python -m benchmarks.batch_invariance_cost --shapes {' '.join(args.shapes)}"
    note = f"{args.model}, {args.layers or 32} layers; milliseconds of a step or a prompt."
    finish(args, {"command": command, "note": note, **origin(args), "rows": rows})


if __name__ == "__main__":
    main()
