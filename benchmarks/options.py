"""What a request's options cost a decode step: `python -m benchmarks.options`.

Wall time of a step of `generate`-like decoding, everything included, as a ratio to plain greedy
steps of the same session, in turns. Log-probabilities, biases, masks, grammars, and the score of
prompts beside computing the same prompts. Weights are random.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step import build
from benchmarks.harness import Bar, bar_table, free, origin, parser_of, verdicts, write
from benchmarks.shapes import MODELS, tiny_llama
from graphs import DecodeSession

GRAMMAR = 'root ::= "[" item*\nitem ::= "{\\"key\\": " [0-9]+ ", \\"name\\": \\"" [a-z ]* "\\"}, "'
"""JSON without an end."""


def large_tokenizer(vocab_size: int) -> Any:
    """Byte-level BPE of so many tokens, most of them made up."""
    import itertools
    import string

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<eos>", *alphabet])}
    words = itertools.chain.from_iterable(
        itertools.product(string.ascii_lowercase + string.digits + '"{}[]:, ', repeat=n)
        for n in range(2, 5)
    )
    for word in words:
        if len(vocab) >= vocab_size:
            break
        vocab.setdefault("".join(word).replace(" ", "Ġ"), len(vocab))
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def cases(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Options of a request, by name."""
    return {
        "greedy": {},
        "logprobs=0": {"logprobs": 0},
        "logprobs=20": {"logprobs": 20},
        "logit_bias of 30": {"logit_bias": dict.fromkeys(range(1, 31), 0.5)},
        "allowed_token_ids": {"allowed_token_ids": list(range(0, vocab_size, 2))},
        "grammar": {"structured_outputs": {"grammar": GRAMMAR}, "min_tokens": 10**6, "eos": 0},
    }


BARS = {
    "logprobs=0": 1.02, "logprobs=20": 1.05, "logit_bias of 30": 1.03, "allowed_token_ids": 1.03,
    "grammar": 1.10, "score": 1.10,
}  # fmt: skip


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_ms(
    session: DecodeSession, prompts: list[list[int]], steps: int, asked: dict[str, Any]
) -> float:
    """Wall milliseconds of a decode step of all prompts, after the first ones."""
    asked = {"eos": ()} | asked
    requests = [session.add(prompt, steps + 40, **asked) for prompt in prompts]
    book = session.book.requests
    while min(len(book[i].token_ids) for i in requests) < 16:
        session.step()
    synchronize(session.device.type)
    before, begin = sum(session.num_steps.values()), time.perf_counter()
    while sum(session.num_steps.values()) - before < steps:
        session.step()
    synchronize(session.device.type)
    seconds, number = time.perf_counter() - begin, sum(session.num_steps.values()) - before
    for request in requests:
        session.discard(request)
    return 1000 * seconds / number


def prompts_ms(session: DecodeSession, run: Callable[[], object]) -> float:
    """Wall milliseconds of a call, once the device is idle."""
    synchronize(session.device.type)
    begin = time.perf_counter()
    run()
    synchronize(session.device.type)
    return 1000 * (time.perf_counter() - begin)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = MODELS[args.model](args.layers) if args.device == "cuda" else tiny_llama(2)
    if args.device == "cpu":
        config.vocab_size = 2000
    model = torch.compile(build(config, "attn_ops", args.device), backend="attn_ops")
    session = DecodeSession(
        model, max_batch_size=args.batch, max_tokens=args.context + 400,
        tokenizer=large_tokenizer(config.vocab_size), decode_steps=args.decode_steps,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch, args.context)
    prompts = torch.randint(1, config.vocab_size, shape, generator=generator).tolist()
    options, times = cases(config.vocab_size), {}
    for round_ in range(args.rounds + 1):
        for name, asked in options.items():
            ms = step_ms(session, prompts, args.steps, asked)
            if round_:  # the first one captures
                times.setdefault(name, []).append(ms)
    runs: dict[str, Callable[[], object]] = {
        "prompts": lambda: session.generate(prompts, 1, eos=()),
        "score": lambda: session.score(prompts),
    }
    peak = None
    for round_ in range(args.rounds + 1):
        for name, run in runs.items():
            if args.device == "cuda":
                free()
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            ms = prompts_ms(session, run)
            if args.device == "cuda" and name == "score":
                peak = torch.cuda.max_memory_allocated() - base
            if round_:
                times.setdefault(name, []).append(ms)
    by_name = {name: statistics.median(found) for name, found in times.items()}
    rows = {name: {"ms": ms, "longest": max(times[name])} for name, ms in by_name.items()}
    bars = [
        Bar(f"{name} / {'prompts' if name == 'score' else 'greedy'}", "<=", bound,
            by_name[name] / by_name["prompts" if name == "score" else "greedy"]).as_dict()
        for name, bound in BARS.items()
    ]  # fmt: skip
    gib = None if peak is None else peak / 2**30
    bars.append(Bar("GiB above the rest while prompts are scored", "<=", 1.0, gib).as_dict())
    command = f"python -m benchmarks.options --batch {args.batch} --context {args.context}"
    note = (
        f"{args.model}, bf16; medians of {args.rounds} rounds of {args.steps} steps; prompts and "
        "score are whole calls."
    )
    found = {"command": command, "note": note} | origin(args)
    return found | {"rows": rows, "bars": bars}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--model", default="llama-3-8b", choices=sorted(MODELS))
    found.add_argument("--layers", type=int, default=None)
    found.add_argument("--batch", type=int, default=64)
    found.add_argument("--context", type=int, default=1024)
    found.add_argument("--steps", type=int, default=96, help="timed in each round")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--decode-steps", type=int, default=1)
    args = found.parse_args()
    result = measure(args)
    write(args.json, result)
    table = Table(title=f"{args.batch} x {args.context}")
    for column in ("what", "ms"):
        table.add_column(column)
    for name, row in result["rows"].items():
        table.add_row(name, f"{row['ms']:.3f}")
    Console().print(table, bar_table(result["bars"]), verdicts(result["bars"]))


if __name__ == "__main__":
    main()
