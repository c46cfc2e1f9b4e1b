"""Milliseconds a token beside vLLM and Transformers: `python -m benchmarks.beside_vllm`.

The Llama-3-8B shape, bf16, random weights, greedy. Each way generates from prompts of random tokens
around `context`, twice; the difference of the times over the difference of the tokens is what a
user waits for one token. Each way has a process, so that it has the GPU to itself:

    eager, static   `generate` of Transformers with its default cache, and with its compiled one
    attn-ops        `DecodeSession.generate`, merged projections
    vllm            `LLM.generate`, prefix caching off. It must be installed; where that is another
                    folder, name it with --vllm-path
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import origin, parser_of, write
from benchmarks.shapes import llama_3_8b

Generate = Callable[[list[list[int]], int], object]
"""Continues all prompts by so many tokens."""

FEW, MANY = 16, 80
WAYS = ("eager", "static", "attn-ops", "vllm")
SLOW = ("eager", "static")
"""Measured in the first case alone, by fewer tokens."""


def token_ms(generate: Generate, batch: int, context: int, few: int, many: int) -> float:
    """Time per token of all requests together, around `context` tokens."""
    generator = torch.Generator().manual_seed(0)
    length = context - (few + many) // 2

    def seconds(num_tokens: int) -> float:
        prompts = torch.randint(10, 128000, (batch, length), generator=generator).tolist()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        generate(prompts, num_tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for num_tokens in (many, few):
        seconds(num_tokens)
    found = [(seconds(many) - seconds(few)) / (many - few) for _ in range(5)]
    return 1000 * statistics.median(found)


def of_transformers(cases: list[tuple[int, int]], static: bool) -> Generate:
    from benchmarks.decode_step import build

    model: Any = build(llama_3_8b(), "sdpa")
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"

    def generate(prompts: list[list[int]], num_tokens: int) -> object:
        ids = torch.tensor(prompts, device="cuda")
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
            min_new_tokens=num_tokens, **options,
        )  # fmt: skip

    return generate


def of_attn_ops(cases: list[tuple[int, int]]) -> Generate:
    from benchmarks.decode_step import merged
    from graphs import DecodeSession

    batches, longest = [batch for batch, _ in cases], max(context for _, context in cases) + MANY
    session = DecodeSession(
        merged(llama_3_8b(), "cuda"), max_batch_size=max(batches), max_tokens=longest,
        max_tokens_per_step=8192, cache_tokens=max(batches) * longest,
    )  # fmt: skip
    session.warm_up()
    return lambda prompts, num_tokens: session.generate(prompts, num_tokens, eos=())


def set_environment() -> None:
    """Before vLLM is imported: one process, and no sampler that is compiled at its first call."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def engine_of(max_tokens: int, max_batch_size: int, **options: Any) -> Any:
    """vLLM's engine for the Llama-3-8B shape with random weights, in this process."""
    set_environment()
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    options = {"enable_prefix_caching": False, "gpu_memory_utilization": 0.85} | options
    with tempfile.TemporaryDirectory() as folder:
        config = llama_3_8b()
        config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
        config.save_pretrained(folder)
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=max_tokens, max_num_seqs=max_batch_size, **options,
        )  # fmt: skip


def of_vllm(cases: list[tuple[int, int]]) -> Generate:
    longest, most = max(context for _, context in cases), max(batch for batch, _ in cases)
    engine = engine_of(longest + MANY, most)
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    def generate(prompts: list[list[int]], num_tokens: int) -> object:
        asked = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.generate(inputs, asked, use_tqdm=False)

    return generate


def measure(way: str, cases: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds a token by case; of the slow ways the first case alone."""
    cases = cases[:1] if way in SLOW else cases
    few, many = (4, 20) if way in SLOW else (FEW, MANY)
    make = {
        "eager": lambda: of_transformers(cases, static=False),
        "static": lambda: of_transformers(cases, static=True),
        "attn-ops": lambda: of_attn_ops(cases),
        "vllm": lambda: of_vllm(cases),
    }[way]
    generate = make()
    return {f"{b}x{c}": token_ms(generate, b, c, few, many) for b, c in cases}


def in_a_process(way: str, args: argparse.Namespace) -> dict[str, float] | str:
    """What `measure` gives, or the last line of its error."""
    environment = dict(os.environ)
    if way == "vllm" and args.vllm_path:
        paths = [args.vllm_path, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "benchmarks.beside_vllm", "--way", way, "--cases", *args.cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-3000:])
        return done.stderr.strip().rpartition("\n")[2][:200]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "8x1024", "64x1024"])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--vllm-path", default="", help="a folder that vLLM is installed in")
    parser.add_argument("--way", default="", help="measure this one here, and print JSON")
    args = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    if args.way:
        print(json.dumps(measure(args.way, cases)))
        return
    command = f"python -m benchmarks.beside_vllm --cases {' '.join(args.cases)}"
    result = {"command": command, **origin(args), "rows": {}}
    for way in args.ways:
        found = in_a_process(way, args)
        result["rows"][way] = found if isinstance(found, dict) else {"error": found}
        print(way, found, flush=True)
        write(args.json and str(Path(args.json)), result)


if __name__ == "__main__":
    main()
