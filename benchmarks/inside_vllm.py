"""vLLM with our attention over vLLM with its own: `python -m benchmarks.inside_vllm`.

A decode step of the Llama-3-8B shape, bf16, random weights, greedy. vLLM schedules, compiles and
captures as it does by default; only the attention backend differs. Prompts of random tokens are
generated from twice, with prefixes cached so that they are computed once: the difference of the
times over the difference of the tokens is a step around `context`. Each way has a process:

    FLASH_ATTN       vLLM's own
    CUSTOM           ours, by our order of preference
    CUSTOM:TRITON    ours, by that backend
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.beside_vllm import engine_of, set_environment
from benchmarks.harness import origin, parser_of, write

FEW, MANY, ROUNDS = 8, 72, 5


def engine_for(way: str, cases: list[tuple[int, int]]) -> Any:
    """An engine for all cases."""
    set_environment()
    backend, _, inner = way.partition(":")
    if backend == "CUSTOM":
        from attn_ops.integrations.vllm import register

        register(inner or None)
    return engine_of(
        max(context for _, context in cases) + MANY, max(batch for batch, _ in cases),
        enable_prefix_caching=True, attention_config={"backend": backend},
    )  # fmt: skip


def step_ms(engine: Any, batch: int, context: int) -> float:
    """Median time of a step of `batch` requests around `context` tokens."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(10, 128000, (batch, context - (FEW + MANY) // 2), generator=generator)
    prompts: Any = [{"prompt_token_ids": row} for row in ids.tolist()]

    def seconds(num_tokens: int) -> float:
        asked = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, asked, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for num_tokens in (FEW, MANY):
        seconds(num_tokens)
    found = [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) for _ in range(ROUNDS)]
    return 1000 * statistics.median(found)


def measure(way: str, cases: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds a step by case."""
    engine = engine_for(way, cases)
    return {f"{batch}x{context}": step_ms(engine, batch, context) for batch, context in cases}


def in_a_process(way: str, args: argparse.Namespace) -> dict[str, float] | str:
    """What `measure` gives, or the last line of its error."""
    environment = dict(os.environ)
    if args.vllm_path:
        paths = [args.vllm_path, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "benchmarks.inside_vllm", "--way", way, "--cases", *args.cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-6000:])
        return done.stderr.strip().rpartition("\n")[2][:200]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def ratios(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of every other way, its time over that of FLASH_ATTN."""
    base = rows.get("FLASH_ATTN", {})
    return {
        way: {case: ms / base[case] for case, ms in row.items() if case in base}
        for way, row in rows.items()
        if way != "FLASH_ATTN"
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "64x1024", "256x1024"])
    parser.add_argument("--ways", nargs="+", default=["FLASH_ATTN", "CUSTOM"])
    parser.add_argument("--vllm-path", default="", help="a folder that vLLM is installed in")
    parser.add_argument("--way", default="", help="measure this one here, and print JSON")
    args = parser.parse_args()
    cases = [(int(batch), int(context)) for batch, context in (c.split("x") for c in args.cases)]
    if args.way:
        print(json.dumps(measure(args.way, cases)))
        return
    command = f"python -m benchmarks.inside_vllm --cases {' '.join(args.cases)}"
    result: dict[str, Any] = {"command": command, **origin(args), "rows": {}}
    for way in args.ways:
        found = in_a_process(way, args)
        result["rows"][way] = found if isinstance(found, dict) else {"error": found}
        result["over FLASH_ATTN"] = ratios(result["rows"])
        print(way, found, result["over FLASH_ATTN"].get(way, ""), flush=True)
        write(args.json, result)


if __name__ == "__main__":
    main()
