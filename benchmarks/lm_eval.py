"""lm-eval's multiple choice by a session beside its model `hf`: `python -m benchmarks.lm_eval`.

Seconds to score `--answers` continuations of each of `--questions` contexts of 400 random tokens.
`hf` runs with sdpa at each of `--batch-sizes`, on a quarter of the questions; then all of them at
its fastest. First both score with a small float32 model; their numbers must be equal.
"""

import argparse
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from benchmarks.decode_step import build
from benchmarks.harness import finish, free, model_of, origin, parser_of, seconds_of
from benchmarks.options import large_tokenizer
from benchmarks.shapes import MODELS, tiny_llama
from graphs import DecodeSession
from graphs.integrations.lm_eval import AttnOpsLM

LONGEST = 12
"""Tokens of an answer at most."""

Requests = list[tuple[tuple[str, str], list[int], list[int]]]


def requests_of(questions: int, answers: int, context: int, vocab_size: int) -> Requests:
    """Texts that stand for nothing, and tokens of a question and of each of its answers."""
    generator = torch.Generator().manual_seed(3)

    def draw(number: int) -> list[int]:
        return torch.randint(3, vocab_size, (number,), generator=generator).tolist()

    found: Requests = []
    for question in range(questions):
        head = draw(context)
        for answer in range(answers):
            length = int(torch.randint(2, LONGEST + 1, (1,), generator=generator))
            found.append(((f"{question}", f"{answer}"), head, draw(length)))
    return found


def scored(model: Any, requests: Requests) -> list[tuple[float, bool]]:
    return model._loglikelihood_tokens(requests, disable_tqdm=True)


def row_of(model: Any, requests: Requests) -> dict[str, float]:
    return {"seconds": seconds_of(lambda: scored(model, requests))}


def ours(model: Any, tokenizer: Any, context: int, **options: Any) -> AttnOpsLM:
    model.set_attn_implementation("attn_ops")
    compiled: Any = model
    if next(model.parameters()).device.type == "cuda":
        compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    sizes = {"max_batch_size": 256, "max_tokens": context + LONGEST + 8, "lazy_capture": True}
    session = DecodeSession(compiled, tokenizer=tokenizer, share_prefixes=True, **(sizes | options))
    return AttnOpsLM(session)


def theirs(model: Any, tokenizer: Any, size: int) -> HFLM:
    model.set_attn_implementation("sdpa")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, max_length=2048)


def numbers_equal(device: str) -> bool:
    config = tiny_llama(2)
    model, tokenizer = build(config, "sdpa", device).float(), large_tokenizer(config.vocab_size)
    requests = requests_of(4, 4, 60, config.vocab_size)
    expected = scored(theirs(model, tokenizer, 4), requests)
    found = scored(ours(model, tokenizer, 60, cache_tokens=4096), requests)
    pairs = zip(expected, found, strict=True)
    return all(abs(x[0] - y[0]) < 1e-3 and x[1] == y[1] for x, y in pairs)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    equal = numbers_equal(args.device)
    config = MODELS[args.model](args.layers) if args.device == "cuda" else tiny_llama(2)
    model, tokenizer = build(config, "sdpa", args.device), large_tokenizer(config.vocab_size)
    sizes = (args.questions, args.answers, args.context, config.vocab_size)
    requests, times, rows = requests_of(*sizes), {}, {}
    part = requests[: max(len(requests) // 4, 1)]
    for size in args.batch_sizes:
        name = f"hf, batch {size}, a quarter"
        try:
            scored(theirs(model, tokenizer, size), part[:size])
            rows[name] = row_of(theirs(model, tokenizer, size), part)
            times[size] = rows[name]["seconds"]
        except torch.OutOfMemoryError:
            rows[name] = {"failed": "out of memory"}
        free()
    best = min(times, key=lambda size: times[size])
    rows[f"hf, batch {best}"] = row_of(theirs(model, tokenizer, best), requests)
    free()
    session = ours(model, tokenizer, args.context)
    scored(session, part[:64])
    rows["attn-ops"] = row_of(session, requests)
    command = f"python -m benchmarks.lm_eval --questions {args.questions}"
    note = (
        f"{args.answers} answers each, of 2 to {LONGEST} tokens; {args.model}, bf16. Numbers "
        f"{'equal' if equal else 'DIFFER'} in float32."
    )
    print(note)
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--questions", type=int, default=512)
    found.add_argument("--answers", type=int, default=4)
    found.add_argument("--context", type=int, default=400)
    found.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32, 64])
    args = model_of(found)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
