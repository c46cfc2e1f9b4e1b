"""Log-probabilities of one set of requests, drawn in many ways: how many bits of float32 differ.

    python -m benchmarks.batch_invariance --models llama-3-8b qwen3-8b --layers 2

Requests are drawn alone, which is the reference, and then in batches, chunks, called and captured
steps, with prefixes found, preempted, with several decode steps a launch, with drafts, and scored.
With `--default` the same is done without `batch_invariant`, which must find differences.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.decode_step import build
from benchmarks.harness import finish, free, origin, parser_of
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
    "drafts": {"num_draft_tokens": 3, "max_batch_size": 24},
}
"""Options of the session that draws, in place of batches of 64."""


def built(name: str, layers: int, device: str) -> torch.nn.Module:
    """The shape with the same random weights in every process."""
    torch.manual_seed(0)
    return build(MODELS[name](layers), "attn_ops", device)


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
    session: DecodeSession,
    prompts: Sequence[list[int]],
    tokens: int,
    seeds: Sequence[int],
    drafts: Sequence[Drawn] = (),
) -> list[Drawn]:
    """Tokens and log-probabilities of each prompt; `drafts`: what is proposed, two of three right.

    Each prompt is drawn with a seed of its own.
    """
    ids = [
        session.add(prompt, tokens, temperature=1.0, seed=seed, logprobs=0, eos=())
        for seed, prompt in zip(seeds, prompts, strict=True)
    ]
    known = {number: ids_of for number, (ids_of, _) in zip(ids, drafts, strict=False)}
    done = dict.fromkeys(ids, 0)
    while session.num_unfinished:
        if not known:
            session.step()
            continue
        proposed = {i: known[i][n : n + 3] for i, n in done.items() if 0 < n < tokens - 1}
        for output in session.verify_draft({i: [*ids[:2], 1] for i, ids in proposed.items()}):
            done[output.request_id] += 1
            if output.finish_reason is not None:
                del done[output.request_id]
    found = []
    for result in map(session.result, ids):
        steps = zip(result.token_ids, result.logprobs, strict=True)
        values = [entry[token].logprob for token, entry in steps]
        found.append((list(result.token_ids), values))
    return found


def differing(got: Sequence[Drawn], want: Sequence[Drawn]) -> tuple[int, int, int]:
    """(log-probabilities that differ, tokens that differ, log-probabilities compared)."""
    pairs = list(zip(got, want, strict=True))
    values = [a != b for x, y in pairs for a, b in zip(x[1], y[1], strict=True)]
    ids = [a != b for x, y in pairs for a, b in zip(x[0], y[0], strict=True)]
    return sum(values), sum(ids), len(values)


def random_way(generator: random.Random) -> dict[str, Any]:
    """Options of a session that draws."""
    return {
        "max_batch_size": generator.choice((1, 2, 3, 7, 16, 40)),
        "max_tokens_per_step": generator.choice((16, 77, 300, 1000, 4096)),
        "cudagraph_mode": generator.choice(("NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
        "decode_steps": generator.choice((1, 1, 2, 5)),
        "share_prefixes": generator.choice((False, True)),
        "cache_tokens": generator.choice((2400, 8192, 1 << 16)),
        "block_size": generator.choice((16, 32)),
    }


def measured(
    model: torch.nn.Module,
    prompts: list[list[int]],
    tokens: int,
    number: int = 0,
    first_seed: int = 0,
    ways: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, tuple[int, int, int]]:
    """Each way's differences from requests that are drawn alone, and those of random sessions."""
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True)
    common = {"max_tokens": 1200, "cache_tokens": 1 << 17, **options}

    def session(**more: Any) -> DecodeSession:
        return DecodeSession(compiled, **{"max_batch_size": 64, **common, **more})  # type: ignore

    def compared(
        some: Sequence[int], drafts: Sequence[Drawn] = (), twice: bool = False, **more: Any
    ) -> tuple[int, int, int]:
        free()
        one, chosen = session(**more), [prompts[i] for i in some]
        if twice:
            drawn(one, chosen, tokens, some)
        got = drawn(one, chosen, tokens, some, drafts)
        return differing(got, [want[i] for i in some])

    alone = session(max_batch_size=1)
    want = [drawn(alone, [prompt], tokens, [i])[0] for i, prompt in enumerate(prompts)]
    del alone
    seeds, found = range(len(prompts)), {}
    for name in WAYS if ways is None else ways:
        drafts = want if name == "drafts" else ()
        found[name] = compared(seeds, drafts, name == "prefixes", **WAYS[name])
        print(name, found[name], flush=True)
    totals = [0, 0, 0]
    for seed in range(first_seed, first_seed + number):
        generator = random.Random(seed)
        more = random_way(generator)
        some = generator.sample(seeds, min(len(prompts), generator.choice((1, 5, 20, 60))))
        counts = compared(some, **more)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        if counts[0]:
            print(f"seed {seed}: {counts} {more}", flush=True)
        if seed % 10 == 9:
            print(f"up to seed {seed}", totals, flush=True)
    if number:
        found[f"{number} random sessions"] = (totals[0], totals[1], totals[2])
        print(f"{number} random sessions", totals, flush=True)
    free()
    scores = session().score(prompts, [ids for ids, _ in want])
    given = [(ids, list(score.logprobs)) for (ids, _), score in zip(want, scores, strict=True)]
    found["scored"] = differing(given, want)
    print("scored", found["scored"], flush=True)
    return found


def rows_of(found: dict[str, dict[str, tuple[int, int, int]]]) -> dict[str, dict[str, str]]:
    """By way and model: log-probabilities that differ, of how many."""
    ways = next(iter(found.values()))
    return {
        way: {name: f"{one[way][0]:,} of {one[way][2]:,}" for name, one in found.items()}
        for way in ways
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3-8b"], choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--random", type=int, default=0, help="sessions of random options")
    parser.add_argument("--first-seed", type=int, default=0, help="of the random sessions")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--default", action="store_true", help="without batch_invariant")
    args = parser.parse_args()
    found = {}
    for name in args.models:
        torch._dynamo.reset()
        model = built(name, args.layers, args.device)
        prompts = requests(args.requests, MODELS[name](1).vocab_size)
        found[name] = measured(
            model, prompts, args.new_tokens, args.random, args.first_seed, args.ways,
            batch_invariant=not args.default, kv_cache_dtype=args.kv_cache_dtype,
        )  # fmt: skip
        del model
        free()
    tokens = sum(one[1] for ways in found.values() for one in ways.values())
    note = (
        f"Of log-probabilities of requests drawn alone, how many bits differ; {tokens} tokens do. "
        f"{args.layers} layers, {args.requests} requests, {args.new_tokens} tokens each."
    )
    command = f"python -m benchmarks.batch_invariance{' --default' if args.default else ''}"
    finish(args, {"command": command, **origin(args), "note": note, "rows": rows_of(found)})


if __name__ == "__main__":
    main()
