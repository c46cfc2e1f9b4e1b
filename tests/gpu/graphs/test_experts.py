"""Captured sessions of models with experts: every replay is that of a call.

With `batch_invariant` a replay has a call's bits, so that rows choose the same experts. Without it
near ties fall another way: there each token takes all experts. 30 to 60 s a test on one H100
(predicted).
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attn_ops.integrations import transformers as integration
from tests.gpu import graph_cases as cases
from tests.kit.sessions import is_empty, poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 4}),
    "qwen3_moe, all": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 40},
    ),
    "deepseek_v3, all": ("deepseek_v3", cases.LATENT | {"first_k_dense_replace": 1}),
}
NUM_STEPS = 500


def built(family: str, sizes: dict[str, Any], device: str = "cuda") -> torch.nn.Module:
    integration.register()
    more = {"moe_intermediate_size": 128, "num_hidden_layers": 3, "eos_token_id": None}
    sizes = cases.SIZES | more | sizes
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="attn_ops"
        )
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.08)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", CASES)
def test_500_random_steps_verified(name):
    family, sizes = CASES[name]
    model = built(family, sizes)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True)
    options: dict[str, Any] = {"backend": None, "verify": "always"}
    options["batch_invariant"] = not name.endswith("all")
    session = poisoned(cases.small(compiled, max_tokens=160, capture_sizes=[1, 2, 4], **options))
    session.warm_up()
    matches = session.compile_record.matches()
    assert matches["experts"] > 0
    assert matches["router"] > 0
    num_compiled, visitors = cases.num_compiled(), cases.Visitors(session)
    while session.num_steps["captured"] < NUM_STEPS:
        visitors.step()
    visitors.drain()
    assert session.verifier is not None
    assert session.verifier.num_checked >= NUM_STEPS
    assert cases.num_compiled() == num_compiled, "nothing is compiled behind the warm-up"
    assert is_empty(session)
