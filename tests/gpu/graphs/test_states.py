"""Captured sessions of models whose layers keep states: replays advance each state once.

Sizes of a head are those of real models. Layers have no experts in float32: those of Transformers
read numbers from the GPU. A test takes about 80 s on one H100, three at a time (11077c9).
"""

from typing import Any

import pytest
import torch

from graphs import CUDAGraphMode, DecodeSession
from graphs.capture.verifier import VerificationError
from tests.gpu import graph_cases as cases
from tests.gpu.graph_cases import PROMPTS, tokens
from tests.kit.sessions import is_empty, poisoned
from tests.kit.state_models import build_state_model

pytestmark = pytest.mark.gpu

_WIDE: dict[str, Any] = {
    "vocab_size": cases.VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
_DENSE = {"mlp_only_layers": [0, 1, 2, 3]}
_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LATENT = {
    "linear_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": _WIDE | _HEADS | _DENSE,
    "kimi_linear": _WIDE | _LATENT,
    "nemotron_h": _WIDE | {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128},
    "bamba": _WIDE | _MAMBA2,
    "lfm2": _WIDE | {"block_ff_dim": 512},
    "mamba": _WIDE | {"state_size": 16, "time_step_rank": 16},
}
"""A type of every rule: gated delta rule, KDA, Mamba-2 (twice), convolutions alone, Mamba."""


_DEFAULT = {"layer_types": None, "vocab_size": 32000, "max_position_embeddings": 4096}
_QWEN = _DEFAULT | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    **_HEADS,
}
REAL: dict[str, dict[str, Any]] = {
    "qwen3_next": _QWEN
    | {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": _QWEN
    | {"hidden_size": 2560, "intermediate_size": 9216, "num_key_value_heads": 4},
    "kimi_linear": _LATENT
    | {
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "linear_num_heads": 32,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    "nemotron_h": {
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
}
"""Four layers of Qwen3-Next-80B, Qwen3.5-4B, Kimi-Linear-48B and Nemotron-H-8B."""


def wide(
    name: str, dtype: torch.dtype, device: str = "cuda", sizes: dict[str, Any] | None = None
) -> Any:
    with torch.device(device if sizes else "cpu"):  # real ones are filled on the GPU
        model = build_state_model(name, **(sizes or MODELS[name]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02 if sizes else 0.08)
    return model.to(device, dtype)


def small(name: str, model: Any, **options: Any) -> DecodeSession:
    backend = "TRITON_MLA" if name == "kimi_linear" else "TRITON"
    sizes = {"max_batch_size": 4, "max_tokens": 160, "max_tokens_per_step": 32}
    return DecodeSession(model, **({"backend": backend} | sizes | options))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_called_steps(name, is_compiled):
    """Whole decode steps are captured by default, also several in a row."""
    model = wide(name, torch.float32)
    model = cases.compiled(model) if is_compiled else model
    called = poisoned(small(name, model, cudagraph_mode="NONE"))
    want = tokens(called.generate(PROMPTS, 24))
    assert len({token for found in want for token in found}) > 10
    for decode_steps in (1, 8):
        session = poisoned(small(name, model, decode_steps=decode_steps))
        assert tokens(session.generate(PROMPTS, 24)) == want, decode_steps
        latent = name == "kimi_linear"
        mode = CUDAGraphMode.FULL_DECODE_ONLY if latent else CUDAGraphMode.FULL
        assert session.graph_mode is mode
        assert session.num_steps["captured"] > 0
        assert session.counters.num_recompiles == 0
        assert is_empty(session)
        session.release()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_nothing(name, is_compiled):
    """Right, half right and wrong ones; captured, and verified."""
    model = wide(name, torch.float32)
    want = tokens(small(name, model, cudagraph_mode="NONE").generate(PROMPTS, 24))
    model = cases.compiled(model) if is_compiled else model
    session = poisoned(small(name, model, num_draft_tokens=3, verify="always"))
    ids = [session.add(prompt, 24) for prompt in PROMPTS]
    made, num_calls = dict.fromkeys(ids, 0), 0
    while session.num_unfinished:
        drafts = {}
        for number, (request, found) in enumerate(zip(ids, want, strict=True)):
            draft = found[made[request] :][:3]
            wrong = (number + num_calls) % 4  # 3: none
            drafts[request] = [t if i != wrong else (t + 1) % 64 for i, t in enumerate(draft)]
        for output in session.verify_draft(drafts):
            made[output.request_id] += 1
        num_calls += 1
    results = [session.result(request) for request in ids]
    assert [result.token_ids for result in results if result is not None] == want
    assert session.num_steps["captured"] > 0
    assert is_empty(session)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_begin_behind_kept_states(name):
    model = wide(name, torch.float32)
    prompts = [[*range(1, 60), *rest] for rest in ([3], [7, 8], [9] * 30, [9] * 40)]
    want = [tokens(small(name, model).generate([prompt], 16))[0] for prompt in prompts]
    session = poisoned(small(name, model, share_prefixes=True, block_size=16))
    for _ in range(2):
        for prompt, found in zip(prompts, want, strict=True):
            assert tokens(session.generate([prompt], 16)) == [found]
    prefixes = session.report().prefixes
    assert prefixes is not None
    assert prefixes.num_hits >= 5
    assert is_empty(session)


@pytest.mark.parametrize("name", MODELS)
def test_nearly_the_same_tokens_in_bfloat16(name):
    """Sums are in another order, so that later tokens may part where two are nearly equal."""
    model = wide(name, torch.bfloat16)
    want = tokens(small(name, model, cudagraph_mode="NONE").generate(PROMPTS, 8))
    found = tokens(poisoned(small(name, model)).generate(PROMPTS, 8))
    same = [mine[:3] == theirs[:3] for mine, theirs in zip(found, want, strict=True)]
    assert sum(same) >= len(PROMPTS) - 2


@pytest.mark.parametrize(
    ("dtype", "decode_steps"), [(torch.bfloat16, 1), (torch.float32, 8)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("name", MODELS)
def test_100_random_steps_verified(name, dtype, decode_steps):
    """Prompts in chunks, all kinds of sampling, a cache that makes requests wait."""
    options = {"cache_tokens": 400, "capture_sizes": [1, 2, 4], "decode_steps": decode_steps}
    model = cases.compiled(wide(name, dtype))
    session = poisoned(small(name, model, verify="always", **options))
    session.warm_up()
    states = session.cache.states
    assert states is not None
    assert all(t.isnan().all() for t in states.tensors.values()), "captures run on padding"
    num_compiled, visitors = cases.num_compiled(), cases.Visitors(session)
    while session.num_steps["captured"] < 100:
        visitors.step()
    visitors.drain()
    assert session.verifier is not None
    assert session.verifier.num_checked >= 100
    assert cases.num_compiled() == num_compiled, "nothing is compiled behind the warm-up"
    assert all(t[0].isnan().all() for t in states.tensors.values()), "nobody's slot"
    assert is_empty(session)


@pytest.mark.parametrize("name", REAL)
def test_500_random_steps_of_real_sizes_verified(name):
    """Prompts are long enough for kernels that go by blocks of rows.

    A replay rounds in another order than a call, so near ties of Kimi's 8 of 256 experts fall
    another way (docs/graphs.md). Each weighs 2.4 / 8, so another one in the last layer moves the
    farthest of 32,000 logits by 0.43, and by 0.44 on an H100 at 39a9808: there a bias chooses them.
    """
    whole = wide(name, torch.bfloat16, sizes=REAL[name])
    for key, buffer in whole.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(2.0 * torch.randperm(buffer.numel(), device=buffer.device))
    model = cases.compiled(whole)
    session = poisoned(small(name, model, verify="always", max_tokens=512, max_tokens_per_step=256))
    session.warm_up()
    visitors = cases.Visitors(session, max_prompt=400)
    while session.num_steps["captured"] < 500:
        visitors.step()
    visitors.drain()
    assert session.verifier is not None
    assert session.verifier.num_checked >= 500
    assert is_empty(session)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_steps_with_prompts_are_captured_if_asked(name):
    model = wide(name, torch.float32)
    want = tokens(small(name, model, cudagraph_mode="NONE").generate(PROMPTS, 16))
    for mode in ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE"):
        session = poisoned(small(name, model, cudagraph_mode=mode))
        assert tokens(session.generate(PROMPTS, 16)) == want, mode
        assert session.num_steps["captured"] > 0
        session.release()


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "bamba", "mamba"])
def test_a_replay_that_leaves_another_state_is_found(name):
    options = {"lazy_capture": True, "cudagraph_mode": "FULL_DECODE_ONLY"}
    session = small(name, wide(name, torch.float32), verify="always", **options)
    session.add(PROMPTS[2], 8)
    while session.num_steps["captured"] == 0:
        session.step()
    states = session.cache.states
    assert states is not None
    place = next(place for place in states.tensors if place[0] == "recurrent")
    (graph,) = [captured.graph for captured in session.graphs or ()]
    run = graph.graph.replay

    def stale(metadata=None):
        run(metadata)
        states.tensors[place][1:].mul_(1.05)

    graph.graph.replay = stale
    with pytest.raises(VerificationError, match="recurrent state"):
        session.step()
