"""Experts in FP8 of a Transformers model: by our operator, and dequantized by Transformers."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from attn_ops.integrations import transformers as integration
from attn_ops.ops.moe.composite import dequantized
from graphs import DecodeSession

PROMPTS = [[3, 5, 7, 11], [2], list(range(20, 60))]


def models(block_size, hidden=256, act="silu"):
    """A Qwen3-MoE whose experts are in FP8, and one that has their values in float32."""
    integration.register()
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=hidden, moe_intermediate_size=192, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=128, num_hidden_layers=2, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], hidden_act=act,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="attn_ops"
    )
    for weight in plain.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.08)
    plain.eval().requires_grad_(False)
    quantized = copy.deepcopy(plain)
    others = [n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)]
    replace_with_fp8_linear(
        quantized,
        modules_to_not_convert=others,
        quantization_config=FineGrainedFP8Config(weight_block_size=block_size),
        pre_quantized=True,
    )
    for layer, wide in zip(quantized.model.layers, plain.model.layers, strict=True):
        ours, theirs = layer.mlp.experts.to_empty(device="cpu"), wide.mlp.experts
        assert type(ours).__name__ == "FP8Experts"
        for name in ("gate_up_proj", "down_proj"):
            w, scale = getattr(ours, name), getattr(ours, f"{name}_scale_inv")
            scale.data.uniform_(0.5, 1.5)
            w.data.copy_(getattr(theirs, name).data.to(torch.float8_e4m3fn))
            used = scale if block_size is None else scale[:, : -(-w.shape[1] // 128)]
            getattr(theirs, name).data.copy_(dequantized(w, used, torch.float32))
    quantized.requires_grad_(False)
    quantized.set_experts_implementation("attn_ops")
    return quantized.eval(), plain


@pytest.mark.parametrize(("block_size", "act"), [((128, 128), "silu"), (None, "gelu_pytorch_tanh")])
def test_logits_and_tokens(block_size, act):
    quantized, plain = models(block_size, act=act)
    compiled = torch.compile(quantized, backend="attn_ops", fullgraph=True)
    size = {"max_batch_size": 3, "max_tokens": 64}
    ours, theirs = DecodeSession(compiled, **size), DecodeSession(plain, **size)
    wanted = [g.token_ids for g in theirs.generate(PROMPTS, 12)]
    assert [g.token_ids for g in ours.generate(PROMPTS, 12)] == wanted
    assert ours.report().num_recompiles == 0
    x, experts = torch.randn(5, 256), quantized.model.layers[0].mlp.experts
    ids = torch.tensor([[0, 1], [2, 3], [1, 1], [0, 4], [3, 0]])  # 4 is no expert
    weights = torch.rand(5, 2)
    other = plain.model.layers[0].mlp.experts
    there = torch.where(ids < 4, weights, 0)
    torch.testing.assert_close(experts(x, ids, weights), other(x, ids.clamp(max=3), there))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_gate": False}, "experts must have a gate"),
        ({"block_size": (64, 64)}, "block_size must be"),
        ({"down_proj": torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), False)}, "down_proj"),
    ],
)
def test_what_is_refused(change, message):
    experts = models((128, 128))[0].model.layers[0].mlp.experts
    for name, value in change.items():
        setattr(experts, name, value)
    with pytest.raises(ValueError, match=message):
        experts(torch.randn(1, 256), torch.tensor([[0]]), torch.ones(1, 1))


def test_a_gate_that_is_not_known():
    experts = models((128, 128), act="relu")[0].model.layers[0].mlp.experts
    with pytest.raises(ValueError, match="the activation of experts must be known, got 'relu'"):
        experts(torch.randn(1, 256), torch.tensor([[0]]), torch.ones(1, 1))
