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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import origin, parser_of, token_ms, write
from benchmarks.shapes import llama_3_8b

Cases = list[tuple[int, int]]
"""(batch, context)"""
Generate = Callable[[list[list[int]], int], object]
"""Continues all prompts by so many tokens."""

FEW, MANY = 16, 80
WAYS = ("eager", "static", "attn-ops", "vllm")


def of_attn_ops(cases: Cases) -> Generate:
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


def of_vllm(cases: Cases, many: int = MANY, **options: Any) -> Generate:
    """An engine for all cases, each with `many` tokens more."""
    longest, most = max(context for _, context in cases), max(batch for batch, _ in cases)
    engine = engine_of(longest + many, most, **options)
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    def generate(prompts: list[list[int]], num_tokens: int) -> object:
        asked = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.generate(inputs, asked, use_tqdm=False)

    return generate


def measure(way: str, cases: Cases) -> dict[str, float]:
    """Milliseconds a token by case; of Transformers the first case alone, by fewer tokens."""
    few, many = FEW, MANY
    if way == "attn-ops":
        generate = of_attn_ops(cases)
    elif way == "vllm":
        generate = of_vllm(cases)
    else:
        from benchmarks.decode_step import build, transformers_generate

        model = build(llama_3_8b(), "sdpa")
        cases, few, many = cases[:1], 4, 20
        generate = transformers_generate(model, "static" if way == "static" else None)
    return {f"{b}x{c}": token_ms(generate, b, c, few, many) for b, c in cases}


def in_a_process(module: str, way: str, path: str, cases: list[str]) -> dict[str, float] | str:
    """What `measure` of a module gives, or the last line of its error; `path`: of vLLM."""
    paths = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", module, "--way", way, "--cases", *cases],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stderr[-6000:])
        return done.stderr.strip().rpartition("\n")[2][:200]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def over_first(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of every other way, its time over that of the first."""
    (_, first), *others = rows.items()
    return {
        way: {case: ms / first[case] for case, ms in row.items() if case in first}
        for way, row in others
        if "error" not in row
    }


def main_of(
    module: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[str, Cases], dict[str, float]],
    without_vllm: Sequence[str] = (),
) -> None:
    """All ways, one process behind the other; written after each."""
    parser.add_argument("--vllm-path", default="", help="a folder that vLLM is installed in")
    parser.add_argument("--way", default="", help="measure this one here, and print JSON")
    args = parser.parse_args()
    if args.way:
        cases = [(int(batch), int(n)) for batch, n in (c.split("x") for c in args.cases)]
        print(json.dumps(measure(args.way, cases)))
        return
    command = f"python -m {module} --cases {' '.join(args.cases)}"
    result: dict[str, Any] = {"command": command, **origin(args), "rows": {}}
    for way in args.ways:
        path = "" if way in without_vllm else args.vllm_path
        found = in_a_process(module, way, path, args.cases)
        result["rows"][way] = found if isinstance(found, dict) else {"error": found}
        result[f"over {args.ways[0]}"] = over = over_first(result["rows"])
        print(way, found, over.get(way, ""), flush=True)
        write(args.json, result)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "8x1024", "64x1024"])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    main_of("benchmarks.beside_vllm", parser, measure, WAYS[:3])


if __name__ == "__main__":
    main()
