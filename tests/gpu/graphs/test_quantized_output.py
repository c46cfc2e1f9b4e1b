"""Captured sessions of models in FP8 whose attention writes FP8."""

import pytest
import torch

import fx_passes
from benchmarks.quantized_linear import quantize_linear_layers
from graphs import CUDAGraphMode, DecodeSession
from tests.gpu.test_session import VOCAB, tiny_llama

pytestmark = pytest.mark.gpu
OPTIONS = {"max_batch_size": 8, "max_tokens": 512, "max_tokens_per_step": 256}


def model_in_fp8(scheme: str):
    model = tiny_llama()
    prompts = [list(range(40))]

    def calibrate() -> None:
        session = DecodeSession(model, cudagraph_mode=CUDAGraphMode.NONE, **OPTIONS)
        session.generate(prompts, max_new_tokens=4)

    assert quantize_linear_layers(model, scheme, calibrate) == 28
    return model


def compiled(model, attn_quant: str):
    torch._dynamo.reset()
    options = {"attn_quant": attn_quant}
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True, options=options)


def prompts_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 200, (12,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_static"])
def test_captured_steps_are_verified(scheme, kv_cache_dtype, mode):
    """Every replay is compared with a call of the same step, over requests that come and go."""
    model = model_in_fp8(scheme)
    options = OPTIONS | {"kv_cache_dtype": kv_cache_dtype}
    session = DecodeSession(
        compiled(model, "auto"), cudagraph_mode=mode, verify="always", **options
    )
    for seed in range(3):
        session.generate(prompts_of(seed), max_new_tokens=30)
    matches = session.compile_record.matches()["quantize_output"]
    assert matches == 1  # of the layer that is compiled once
    report = session.report()
    assert (report.num_graphs, report.num_recompiles) == (1, 0)


@pytest.mark.parametrize(
    ("backend", "mode"), [("TRITON", "auto"), ("FLASH_ATTN", "FULL_DECODE_ONLY")]
)
def test_500_random_steps_verified(backend, mode):
    """Scales by row, keys and values in bf16: both decode paths, whoever writes FP8.

    FLASH_ATTN adds in another order in replays of prompts. A change of 0.1 percent of attention's
    outputs takes some to the next value in FP8, and logits of this model change by 17 percent.
    """
    model = compiled(model_in_fp8("fp8_row"), "always")
    session = DecodeSession(model, backend=backend, cudagraph_mode=mode, verify="always", **OPTIONS)
    seed = 0
    while session.num_steps["captured"] < 500:
        session.generate(prompts_of(seed), max_new_tokens=30)
        seed += 1
    assert session.report().num_recompiles == 0


@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_static"])
def test_tokens_are_those_of_the_separate_kernel(scheme):
    """FP8 by the same formula, whoever computes it."""
    results = []
    for attn_quant in ("never", "always"):
        session = DecodeSession(
            compiled(model_in_fp8(scheme), attn_quant), backend="TRITON", **OPTIONS
        )
        results.append([g.token_ids for g in session.generate(prompts_of(5), max_new_tokens=24)])
    same = sum(a == b for a, b in zip(*results, strict=True))
    assert same >= 10  # of 12: Inductor alone rounds a scale once less


def test_a_new_scale_counts_in_the_next_replay():
    """Graphs read the scale where it lies; each replay is compared with a call of its step."""
    model, tokens = model_in_fp8("fp8_static"), []
    session = DecodeSession(compiled(model, "always"), backend="TRITON", verify="always", **OPTIONS)
    scales = [x for name, x in model.state_dict().items() if name.endswith("input_scale")]
    assert scales
    for _ in range(2):
        generated = session.generate(prompts_of(7), max_new_tokens=24)
        tokens.append([one.token_ids for one in generated])
        for scale in scales:
            scale.mul_(0.02)  # too small for the values
    assert tokens[0] != tokens[1]
    assert session.report().num_recompiles == 0
