"""What a request's options cost a decode step: `python -m benchmarks.options`.

Wall time of a step of `generate`-like decoding, everything included, as a ratio to plain greedy
steps of the same session, in turns. Log-probabilities, biases, masks, grammars, and the score of
prompts beside computing the same prompts. Weights are random.
"""

import argparse
import itertools
import statistics
import string
import time
from typing import Any

import torch

from benchmarks.decode_step import build
from benchmarks.harness import (
    finish,
    free,
    model_of,
    origin,
    parser_of,
    seconds_of,
    synchronize,
)
from benchmarks.shapes import MODELS, tiny_llama
from graphs import DecodeSession

GRAMMAR = 'root ::= "[" item*\nitem ::= "{\\"key\\": " [0-9]+ ", \\"name\\": \\"" [a-z ]* "\\"}, "'
"""JSON without an end."""


def large_tokenizer(vocab_size: int) -> Any:
    """Byte-level BPE of so many tokens, most of them made up."""
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


def step_ms(
    session: DecodeSession, prompts: list[list[int]], steps: int, asked: dict[str, Any]
) -> float:
    """Wall milliseconds of a decode step of all prompts, after the first ones."""
    asked = {"eos": ()} | asked
    requests = [session.add(prompt, steps + 40, **asked) for prompt in prompts]
    book = session.book.requests
    while min(len(book[i].token_ids) for i in requests) < 16:
        session.step()
    synchronize()
    before, begin = sum(session.num_steps.values()), time.perf_counter()
    while sum(session.num_steps.values()) - before < steps:
        session.step()
    synchronize()
    seconds, number = time.perf_counter() - begin, sum(session.num_steps.values()) - before
    for request in requests:
        session.discard(request)
    return 1000 * seconds / number


def measure(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    config = MODELS[args.model](args.layers) if on_gpu else tiny_llama(2)
    if not on_gpu:
        config.vocab_size = 2000
    model = torch.compile(build(config, "attn_ops", args.device), backend="attn_ops")
    session = DecodeSession(
        model, max_batch_size=args.batch, max_tokens=args.context + 400,
        tokenizer=large_tokenizer(config.vocab_size),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch, args.context)
    prompts = torch.randint(1, config.vocab_size, shape, generator=generator).tolist()
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds + 1):
        for name, asked in cases(config.vocab_size).items():
            times.setdefault(name, []).append(step_ms(session, prompts, args.steps, asked))
    gib = None
    for _ in range(args.rounds + 1):
        free()
        seconds = seconds_of(lambda: session.generate(prompts, 1, eos=()))
        times.setdefault("prompts", []).append(1000 * seconds)
        free()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        seconds = seconds_of(lambda: session.score(prompts))
        times.setdefault("score", []).append(1000 * seconds)
        if on_gpu:
            gib = (torch.cuda.max_memory_allocated() - base) / 2**30
    times = {name: found[1:] for name, found in times.items()}  # the first round captures
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, ms in medians.items():
        plain = medians["prompts" if name in ("prompts", "score") else "greedy"]
        rows[name] = {"ms": ms, "longest": max(times[name]), "ratio": ms / plain}
    rows["score"]["GiB more"] = gib
    command = f"python -m benchmarks.options --batch {args.batch} --context {args.context}"
    note = (
        f"{args.model}, bf16; medians of {args.rounds} rounds of {args.steps} steps; prompts and "
        "score are whole calls."
    )
    return {"command": command, "note": note, **origin(args), "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=96, help="timed in each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = model_of(parser)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
