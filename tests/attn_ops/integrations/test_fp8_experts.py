"""Experts in FP8 of a Transformers model: by our operator, and dequantized by Transformers."""

import copy
import json
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from attn_ops.integrations import transformers as integration
from attn_ops.ops.moe.composite import dequantized
from graphs import DecodeSession

PROMPTS = [[3, 5, 7, 11], [2], list(range(20, 60))]


def qwen(hidden=256, gate=192, act="silu"):
    """A Qwen3-MoE in float32, and the names of its linear layers."""
    integration.register()
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=hidden, moe_intermediate_size=gate, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=128, num_hidden_layers=2, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], hidden_act=act,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="attn_ops"
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.08)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    return model.eval().requires_grad_(False), linear


def models(block_size, act="silu"):
    """A Qwen3-MoE whose experts are in FP8, and one that has their values in float32."""
    plain, others = qwen(act=act)
    quantized = copy.deepcopy(plain)
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


def write_checkpoint(folder, block_size, scale_fmt, **sizes):
    """As FP8 checkpoints are: of each expert its gate, up and down, with scales of theirs alone."""
    model, linear = qwen(**sizes)
    model.save_pretrained(folder)
    stored = {}
    for name, w in load_file(folder / "model.safetensors").items():
        stored[name] = w
        if ".experts." in name:
            rows, columns = (1, 1) if block_size is None else (-(-n // 128) for n in w.shape)
            scale = torch.rand(rows, columns) + 0.5
            if scale_fmt == "ue8m0":
                scale = (2.0 ** torch.randint(-2, 2, (rows, columns))).to(torch.float8_e8m0fnu)
            stored |= {name: w.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": block_size, "scale_fmt": scale_fmt}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = how | {"modules_to_not_convert": linear}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("block_size", "scale_fmt", "sizes"),
    [
        ([128, 128], "float", {"gate": 256}),
        ([128, 128], "ue8m0", {"gate": 128}),
        ([128, 128], "float", {"gate": 96}),  # a block of rows ends with the gate
        ([128, 128], "float", {"gate": 64, "hidden": 96}),
        (None, "float", {"gate": 128}),  # a scale of the gate, and one of up
        (None, "float", {"gate": 96, "hidden": 96}),
    ],
)
def test_a_checkpoint(tmp_path, block_size, scale_fmt, sizes):
    """Loaded in FP8, and as Transformers dequantizes it where there is no GPU."""
    write_checkpoint(tmp_path, block_size, scale_fmt, **sizes)
    how = {"dtype": torch.float32, "attn_implementation": "attn_ops"}
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), **how
    )
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        quantized = AutoModelForCausalLM.from_pretrained(
            tmp_path, experts_implementation="attn_ops", **how
        )
    experts = [model.model.layers[1].mlp.experts for model in (plain, quantized)]
    assert [one.down_proj.dtype for one in experts] == [torch.float32, torch.float8_e4m3fn]
    x, ids, weights = torch.randn(5, experts[0].hidden_dim), torch.arange(10) % 4, torch.rand(5, 2)
    theirs, ours = (one(x, ids.view(5, 2), weights) for one in experts)
    torch.testing.assert_close(ours, theirs)


def test_experts_that_are_not_in_fp8():
    """They take "grouped_mm" by the same name."""
    model, _ = qwen()
    x = torch.randn(5, 256), torch.arange(10).view(5, 2) % 4, torch.rand(5, 2)
    wanted = model.model.layers[0].mlp.experts(*x)
    model.set_experts_implementation("attn_ops")
    assert model.config._experts_implementation == "attn_ops"
    torch.testing.assert_close(model.model.layers[0].mlp.experts(*x), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_gate": False}, "experts must have a gate"),
        ({"gate_softcap": 30.0}, "experts must have a gate, no biases and no soft cap, got .*30"),
        ({"block_size": (64, 64)}, "block_size must be"),
        (
            {"_apply_gate": lambda both: both},
            "_apply_gate of FP8Experts must be that of",
        ),
        ({"down_proj": torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), False)}, "down_proj"),
        (
            {"down_proj_scale_inv": torch.nn.Parameter(torch.zeros(4, 2, 2).byte(), False)},
            "down_proj_scale_inv must be floating-point, got torch.uint8",
        ),
    ],
)
def test_what_is_refused(change, message):
    experts = models((128, 128))[0].model.layers[0].mlp.experts
    for name, value in change.items():
        setattr(experts, name, value)
    with pytest.raises(ValueError, match=message):
        experts(torch.randn(1, 256), torch.tensor([[0]]), torch.ones(1, 1))


@pytest.mark.parametrize("later", [False, True])
def test_a_gate_that_is_not_known(later):
    """It is the module's, whatever its config says."""
    experts = models((128, 128), act="silu" if later else "relu")[0].model.layers[0].mlp.experts
    x = torch.randn(1, 256), torch.tensor([[0]]), torch.ones(1, 1)
    if later:
        experts(*x)
        experts.act_fn = torch.nn.ReLU()
    with pytest.raises(ValueError, match="act_fn of experts must be known, got ReLU"):
        experts(*x)
