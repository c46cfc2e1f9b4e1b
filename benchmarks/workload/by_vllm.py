"""The same workload in vLLM: `python -m benchmarks.workload.by_vllm`, where vLLM is installed.

One process, dummy weights, prefix caching off, otherwise its defaults.
"""

import os
import statistics
import tempfile
import time
from typing import Any

from benchmarks.harness import origin, parser_of, write
from benchmarks.shapes import llama_3_8b
from benchmarks.workload.requests import Workload, num_output_tokens

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


def engine_of(workload: Workload) -> Any:
    """vLLM's engine for the Llama-3-8B shape."""
    os.environ.update({name: os.environ.get(name, on) for name, on in ENVIRONMENT.items()})
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        config = llama_3_8b()
        config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
        config.save_pretrained(folder)
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=workload.max_tokens, max_num_seqs=workload.max_batch_size,
            max_num_batched_tokens=workload.max_tokens_per_step, enable_prefix_caching=False,
            gpu_memory_utilization=0.85,
        )  # fmt: skip


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
    begin = time.perf_counter()
    engine = engine_of(workload)
    ready = time.perf_counter() - begin
    times = [run_all(engine, workload) for _ in range(1 + args.rounds)][1:]
    number = num_output_tokens(workload.draw(llama_3_8b().vocab_size))
    row = {
        "wall, s": round(min(times), 2),
        "median": round(statistics.median(times), 2),
        "tokens/s": round(number / min(times)),
        "ready, s": round(ready, 1),
    }
    print(row)
    write(args.json, {**origin(args), "command": "python -m benchmarks.workload.by_vllm",
                      "rows": {"vLLM": row}})  # fmt: skip


if __name__ == "__main__":
    main()
