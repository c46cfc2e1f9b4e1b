"""Log-probabilities of one set of requests, drawn in many ways: how many bits of float32 differ.

    python -m benchmarks.batch_invariance --models llama-3-8b qwen3-8b --layers 2

Requests are drawn alone, which is the reference, and then in batches, chunks, called and captured
steps, with prefixes found, preempted, with several decode steps a launch, with drafts, and scored.
With `--default` the same is done without `batch_invariant`, which must find differences.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from attn_ops.integrations import transformers as integration
from benchmarks.harness import origin, parser_of, write
from benchmarks.shapes import MODELS
from graphs import DecodeSession

WAYS: dict[str, dict[str, Any]] = {
    "batches of 2": {"max_batch_size": 2},
    "batches of 24": {"max_batch_size": 24},
    "batches of 256": {"max_batch_size": 256},
    "chunks of 16": {"max_tokens_per_step": 16, "max_batch_size": 8},
    "chunks of 100": {"max_tokens_per_step": 100},
    "chunks of 512": {"max_tokens_per_step": 512},
    "chunks of 8192": {"max_tokens_per_step": 8192},
    "called": {"cudagraph_mode": "NONE"},
    "decode steps 8": {"decode_steps": 8},
    "prefixes": {"share_prefixes": True},
    "preempted": {"cache_tokens": 4096},
}
"""Options of the session that draws, in place of batches of 64."""


def built(name: str, layers: int, device: str) -> torch.nn.Module:
    """The shape with random weights, whose logits differ enough that drawing has a choice."""
    torch.manual_seed(0)
    config = MODELS[name](layers)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="attn_ops"
        )
    return model.eval().requires_grad_(False)


def requests(number: int, vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 900 tokens; every fourth begins as the one before."""
    generator = torch.Generator().manual_seed(1)
    found: list[list[int]] = []
    for i in range(number):
        length = int(torch.randint(1, 900, (), generator=generator))
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        found.append(found[-1][:400] + tokens[:50] if i % 4 == 3 else tokens)
    return found


Drawn = tuple[list[int], list[float]]


def drawn(
    session: DecodeSession, prompts: Sequence[list[int]], tokens: int, first: int = 0
) -> list:
    """Tokens and log-probabilities of each prompt, drawn with a seed of its own."""
    ids = [
        session.add(prompt, tokens, temperature=1.0, seed=first + i, logprobs=0, eos=())
        for i, prompt in enumerate(prompts)
    ]
    while session.num_unfinished:
        session.step()
    return [_of(session.result(number)) for number in ids]


def _of(result: Any) -> Drawn:
    steps = zip(result.token_ids, result.logprobs, strict=True)
    return list(result.token_ids), [entry[token].logprob for token, entry in steps]


def differing(got: Sequence[Drawn], want: Sequence[Drawn]) -> tuple[int, int, int]:
    """(log-probabilities that differ, tokens that differ, log-probabilities compared)."""
    pairs = list(zip(got, want, strict=True))
    values = [a != b for x, y in pairs for a, b in zip(x[1], y[1], strict=True)]
    ids = [a != b for x, y in pairs for a, b in zip(x[0], y[0], strict=True)]
    return sum(values), sum(ids), len(values)


def measured(
    model: torch.nn.Module, prompts: list[list[int]], tokens: int, **options: Any
) -> dict[str, tuple[int, int, int]]:
    """Each way's differences from requests that are drawn alone."""
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    common = {"max_tokens": 1200, "cache_tokens": 1 << 17, **options}

    def session(**more: Any) -> DecodeSession:
        return DecodeSession(compiled, **{"max_batch_size": 64, **common, **more})  # type: ignore

    alone = session(max_batch_size=1)
    want = [drawn(alone, [prompt], tokens, i)[0] for i, prompt in enumerate(prompts)]
    found = {}
    for name, more in WAYS.items():
        one = session(**more)
        if name == "prefixes":
            drawn(one, prompts, tokens)
        found[name] = differing(drawn(one, prompts, tokens), want)
        print(name, found[name], flush=True)
        del one
    scores = session().score(prompts, [ids for ids, _ in want])
    given = [(ids, list(score.logprobs)) for (ids, _), score in zip(want, scores, strict=True)]
    found["scored"] = differing(given, want)
    print("scored", found["scored"], flush=True)
    return found


def table_of(found: dict[str, dict[str, tuple[int, int, int]]]) -> Table:
    table = Table("way", *found, title="log-probabilities that differ, of how many")
    for way in next(iter(found.values())):
        table.add_row(way, *(f"{one[way][0]} of {one[way][2]}" for one in found.values()))
    return table


def main(arguments: Sequence[str] | None = None, show: Callable[[Any], None] = print) -> dict:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3-8b"], choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--default", action="store_true", help="without batch_invariant")
    args: argparse.Namespace = parser.parse_args(arguments)
    integration.register()
    found = {}
    for name in args.models:
        torch._dynamo.reset()
        model = built(name, args.layers, args.device)
        prompts = requests(args.requests, model.config.vocab_size)
        found[name] = measured(
            model, prompts, args.new_tokens,
            batch_invariant=not args.default, kv_cache_dtype=args.kv_cache_dtype,
        )  # fmt: skip
        del model
        torch.cuda.empty_cache()
    result = {**origin(args), "arguments": vars(args), "differing": found}
    show(table_of(found))
    write(args.json, result)
    return result


if __name__ == "__main__":
    main()
