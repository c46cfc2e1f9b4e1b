"""vLLM with our attention beside vLLM with its own: greedy tokens of small random models.

Each engine has a process, `python -m tests.gpu.test_vllm FOLDER BACKEND INNER CACHE`, four at a
time. Models run as vLLM runs them by default: compiled, decode steps in whole CUDA graphs, prompts
in pieces, requests that come and go.
"""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

VOCAB, NUM_TOKENS = 512, 32
PROMPTS = (1, 5, 17, 31, 40, 64, 100, 130, 300, 2, 33)
"""Lengths: shorter and longer than windows, blocks and a step's tokens; more than run at once."""

WINDOW = 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "initializer_range": 0.06,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def config_of(name: str) -> Any:
    import transformers

    if name == "llama":
        return transformers.LlamaConfig(**SIZES, intermediate_size=512)
    if name == "qwen3":
        return transformers.Qwen3Config(**SIZES, intermediate_size=512)
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    if name == "gemma3":
        return transformers.Gemma3TextConfig(
            **SIZES, **kinds, intermediate_size=512, query_pre_attn_scalar=64
        )
    # Every token goes to all experts: a router's tie would change the token altogether.
    return transformers.GptOssConfig(
        **SIZES | {"max_position_embeddings": 131072}, **kinds, intermediate_size=256,
        num_local_experts=4, num_experts_per_tok=4,
    )  # fmt: skip


def save(name: str, folder: Path) -> None:
    """A model of random weights whose next tokens are told apart well."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(5.0)
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):
                parameter.copy_(torch.linspace(-1.0, 2.0, parameter.numel()))
    model.save_pretrained(folder)
    if name == "gpt_oss":
        rename_experts(folder / "model.safetensors")


def rename_experts(file: Path) -> None:
    """As vLLM 0.24 calls the weights of experts that are not quantized."""
    from safetensors.torch import load_file, save_file

    old, new = ".mlp.experts.", ".mlp.experts.routed_experts."
    save_file({k.replace(old, new): v for k, v in load_file(file).items()}, file, {"format": "pt"})


# -- in the engine's process -----------------------------------------------------------------------


def answer(folder: str, backend: str, inner: str, cache: str) -> dict[str, Any]:
    """Greedy tokens of all prompts, the best log-probabilities at each, and calls of our layer."""
    calls = [0]
    if backend == "CUSTOM":
        from attn_ops.integrations.vllm import register
        from attn_ops.integrations.vllm.backend import AttnOpsImpl

        register(inner or None)
        attend = AttnOpsImpl.attend

        def counted(self: Any, *arguments: Any) -> torch.Tensor:
            calls[0] += 1
            return attend(self, *arguments)

        AttnOpsImpl.attend = counted
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
        max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False, seed=0,
        kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.1, kv_cache_dtype=cache,
        attention_config={"backend": backend}, enforce_eager=False,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    prompts: Any = [
        {"prompt_token_ids": torch.randint(2, VOCAB, (n,), generator=generator).tolist()}
        for n in PROMPTS
    ]
    asked = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=5
    )
    found = [output.outputs[0] for output in engine.generate(prompts, asked, use_tqdm=False)]
    best = [
        [{token: entry.logprob for token, entry in row.items()} for row in one.logprobs]
        for one in found
    ]
    return {"tokens": [list(one.token_ids) for one in found], "best": best, "calls": calls[0]}


def in_a_process(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `answer` gives, or {"error": the end of what the process said}."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        # Engines that compile the same at once would write the same files.
        "VLLM_CACHE_ROOT": str(folder.with_name("-".join([folder.name, *arguments]))),
    }
    command = [sys.executable, "-m", "tests.gpu.test_vllm", str(folder), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=400,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    if done.returncode:
        return {"error": f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"}
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


# -- beside each other -----------------------------------------------------------------------------

CASES = {
    "llama": ("llama", "", "auto", 0.4),
    "llama by FLASH_ATTN": ("llama", "FLASH_ATTN", "auto", 0.4),
    "llama by TRITON": ("llama", "TRITON", "auto", 0.4),
    "qwen3": ("qwen3", "", "auto", 0.4),
    "gemma3": ("gemma3", "", "auto", 0.4),
    "gpt_oss": ("gpt_oss", "", "auto", 0.4),
    "llama over FP8": ("llama", "", "fp8", 1.0),  # vLLM's FA3 rounds q too
}
"""Model, our backend, cache, and how far log-probabilities of one token may lie apart."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By model, backend, our backend and cache; all processes start with the first test."""
    folders = {name: tmp_path_factory.mktemp(name) for name, *_ in CASES.values()}
    for name, folder in folders.items():
        save(name, folder)
    asked: dict[tuple[str, ...], Future] = {}
    with ThreadPoolExecutor(4) as pool:
        for name, inner, cache, _ in CASES.values():
            for call in ((name, "FLASH_ATTN", "", cache), (name, "CUSTOM", inner, cache)):
                if call not in asked:
                    asked[call] = pool.submit(in_a_process, folders[name], *call[1:])
        yield asked


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_vllms_own_attention(answers, case):
    name, inner, cache, apart = CASES[case]
    theirs = answers[name, "FLASH_ATTN", "", cache].result()
    if "error" in theirs:
        pytest.skip(f"vLLM itself does not run the model: {theirs['error'][-500:]}")
    ours = answers[name, "CUSTOM", inner, cache].result()
    assert "error" not in ours, ours["error"]
    assert ours["calls"] > 0, "vLLM ran another backend"
    equal = sum(agrees(*rows, apart) for rows in zip(*(by_request(x) for x in (ours, theirs)),
                                                       strict=True))  # fmt: skip
    print(f"{case}: {equal} of {len(PROMPTS)} requests equal in all {NUM_TOKENS} tokens")
    assert equal >= len(PROMPTS) // 2


def by_request(answer: dict[str, Any]) -> list[tuple[list[int], list[dict[str, float]]]]:
    return list(zip(answer["tokens"], answer["best"], strict=True))


def agrees(ours: Any, theirs: Any, apart: float) -> bool:
    """Whether all tokens are equal. Up to the first that is not they are as likely, and it ties."""
    for i, (a, b, best, other) in enumerate(zip(ours[0], theirs[0], ours[1], theirs[1],
                                                strict=True)):  # fmt: skip
        both = best.keys() & other.keys()
        far = {t: (best[t], other[t]) for t in both if abs(best[t] - other[t]) > apart}
        assert not far, f"log-probabilities at {i}: {far}"
        if a != b:
            assert {str(a), str(b)} <= both, f"token {i}: {best}, {other}"
            tie = abs(best[str(a)] - best[str(b)])
            assert tie <= apart, f"token {i} is {a} for {b}, {tie} apart: {best}, {other}"
            return False
    return True


if __name__ == "__main__":
    print(json.dumps(answer(*sys.argv[1:])))
