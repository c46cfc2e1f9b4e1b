"""The same workload in vLLM: `python -m benchmarks.workload.by_vllm`, where vLLM is installed.

One process, dummy weights, prefix caching off, otherwise its defaults.
"""

import time
from typing import Any

from benchmarks.beside_vllm import engine_of
from benchmarks.harness import finish, origin, parser_of
from benchmarks.shapes import llama_3_8b
from benchmarks.workload.requests import Workload, num_output_tokens


def run_all(engine: Any, workload: Workload) -> float:
    """Seconds from the first request to the last token."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    wishes = workload.draw(llama_3_8b().vocab_size)
    prompts = [{"prompt_token_ids": wish.prompt} for wish in wishes]
    asked = [
        SamplingParams(max_tokens=wish.num_new, temperature=0, ignore_eos=True, detokenize=False)
        for wish in wishes
    ]
    begin = time.perf_counter()
    found = engine.generate(prompts, asked, use_tqdm=False)
    seconds = time.perf_counter() - begin
    drawn = [len(result.outputs[0].token_ids) for result in found]
    assert drawn == [wish.num_new for wish in wishes], "all have the tokens that they want"
    return seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args, workload = parser.parse_args(), Workload()
    limits = workload.max_tokens, workload.max_batch_size
    engine = engine_of(*limits, max_num_batched_tokens=workload.max_tokens_per_step)
    seconds = min([run_all(engine, workload) for _ in range(1 + args.rounds)][1:])
    number = num_output_tokens(workload.draw(llama_3_8b().vocab_size))
    row = {"wall, s": seconds, "output tokens/s": number / seconds}
    command = "python -m benchmarks.workload.by_vllm"
    finish(args, {"command": command, **origin(args), "rows": {"vLLM": row}})


if __name__ == "__main__":
    main()
