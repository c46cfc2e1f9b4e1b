"""What a session that sleeps gives back, and how long it takes: `python -m benchmarks.sleep`.

A process without a session first; then a cache of `--gib`, decode steps captured; then rounds of
`generate`, `sleep` and `wake`, whose tokens must be those of the first. Beside it, a session that
is made again, graphs and all, in place of sleeping.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.decode_step import build
from benchmarks.harness import finish, free, model_of, origin, parser_of, seconds_of, used_gib
from benchmarks.shapes import MODELS, tiny_llama
from graphs import DecodeSession


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = MODELS[args.model](args.layers) if args.device == "cuda" else tiny_llama(2)
    model: Any = torch.compile(build(config, "attn_ops", args.device), backend="attn_ops")
    with torch.no_grad():  # what torch and its libraries take with the first product
        weight = next(model.parameters())
        _ = weight[:256] @ weight[:256].T
    alone = used_gib()
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * 128 * 2
    options = {
        "max_batch_size": args.batch, "max_tokens": 2048, "can_sleep": True,
        "cache_tokens": int(args.gib * 2**30) // bytes_per_token,
    }  # fmt: skip
    prompts = [[5 + i] * (1 + i % 40) for i in range(args.batch)]
    session = DecodeSession(model, **options)
    wanted = session.generate(prompts, 16, eos=())
    awake = used_gib()
    sleeps, wakes, used = [], [], []
    for _ in range(args.rounds):
        sleeps.append(seconds_of(session.sleep))
        used.append(used_gib() - alone)
        wakes.append(seconds_of(session.wake))
        assert session.generate(prompts, 16, eos=()) == wanted
    captured = session.num_steps["captured"]
    session.release()
    del session
    free()
    begin = time.perf_counter()
    again = DecodeSession(model, **options)
    again.warm_up()
    made = time.perf_counter() - begin
    rows = {
        "sleep": {"seconds": max(sleeps)},
        "wake": {"seconds": max(wakes)},
        "a new session, with its graphs": {"seconds": made},
        "GiB above a process without a session, awake": {"GiB": awake - alone},
        "the same asleep, first round": {"GiB": used[0]},
        "the same asleep, last round": {"GiB": used[-1]},
        "replayed steps": {"number": captured},
    }
    layers = "" if args.layers is None else f" --layers {args.layers}"
    command = f"python -m benchmarks.sleep --gib {args.gib} --rounds {args.rounds}{layers}"
    note = f"{args.model}, bf16, {args.batch} requests; seconds are the longest of the rounds."
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--gib", type=float, default=40.0)
    found.add_argument("--batch", type=int, default=32)
    found.add_argument("--rounds", type=int, default=50)
    args = model_of(found)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
