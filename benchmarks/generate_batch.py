"""`generate_batch` on a session beside Transformers' own: `python -m benchmarks.generate_batch`.

Seconds of a whole call, the second one of each: 256 prompts of 32 to 512 tokens, 128 new tokens of
each, greedy. Transformers runs with its settings in turn: what it chooses, and CUDA graphs with
asynchronous batches. First both generate in float32 with a small model; their tokens must be equal.
"""

import argparse
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.decode_step import build
from benchmarks.harness import brief, finish, free, model_of, origin, parser_of, seconds_of
from benchmarks.shapes import MODELS, tiny_llama
from graphs.integrations.generate_batch import disable, enable

THEIRS: dict[str, dict[str, Any]] = {
    "as it chooses": {},
    "graphs, asynchronous": {"use_cuda_graph": True, "use_async_batching": True},
}
OF_A_CPU = {"num_blocks": 64, "max_batch_tokens": 256}
"""On a CPU Transformers would take a part of all memory, and fill it."""


def prompts_of(number: int, longest: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(longest // 16, longest + 1, (number,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def batch(model: Any, prompts: list[list[int]], new: int, **batching: Any) -> dict[str, Any]:
    generation = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    config = ContinuousBatchingConfig(**batching) if batching else None
    return model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=config
    )


def tokens_equal(device: str) -> bool:
    """In float32, of a small model."""
    model: Any = build(tiny_llama(2), "sdpa", device).float()
    prompts = prompts_of(24, 100, 64)
    theirs = batch(model, prompts, 24, **(OF_A_CPU if device == "cpu" else {}))
    enable(model, compile=False)
    ours = batch(model, prompts, 24)
    return all(ours[name].generated_tokens == theirs[name].generated_tokens for name in theirs)


def row_of(model: Any, prompts: list[list[int]], new: int, **batching: Any) -> dict[str, float]:
    """Of the second call."""
    batch(model, prompts, new, **batching)
    seconds = seconds_of(lambda: batch(model, prompts, new, **batching))
    return {"seconds": seconds, "tokens a second": len(prompts) * new / seconds}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    equal = tokens_equal(args.device)
    config = MODELS[args.model](args.layers) if args.device == "cuda" else tiny_llama(2)
    model: Any = build(config, "sdpa", args.device)
    prompts = prompts_of(args.requests, args.longest, config.vocab_size)
    settings = {name: options | {"max_memory_percent": 0.7} for name, options in THEIRS.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, options in (settings if args.device == "cuda" else {"small": OF_A_CPU}).items():
        try:
            rows[f"Transformers, {name}"] = row_of(model, prompts, args.new, **options)
        except Exception as error:  # a setting that does not run here
            rows[f"Transformers, {name}"] = {"failed": brief(error)}
        free()
    enable(model)
    rows["attn-ops"] = row_of(model, prompts, args.new)
    disable(model)
    layers = "" if args.layers is None else f" --layers {args.layers}"
    sizes = f"--requests {args.requests} --new {args.new}{layers}"
    command = f"python -m benchmarks.generate_batch {sizes}"
    note = (
        f"Prompts of {args.longest // 16} to {args.longest} tokens; {args.model}, bf16. Tokens "
        f"{'equal' if equal else 'DIFFER'} in float32."
    )
    print(note)
    return origin(args) | {"command": command, "note": note, "rows": rows}


def main() -> None:
    found = parser_of(__doc__)
    found.add_argument("--requests", type=int, default=256)
    found.add_argument("--longest", type=int, default=512)
    found.add_argument("--new", type=int, default=128)
    args = model_of(found)
    finish(args, measure(args))


if __name__ == "__main__":
    main()
