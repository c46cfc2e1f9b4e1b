"""Latent attention whose `kv_b_proj` is quantized, adapted or merged around: it follows them."""

import copy

import pytest
import torch
from torch import nn

from attn_ops.integrations.merged import merge_projections
from attn_ops.latent_weights import expansion
from benchmarks.quantized_linear import QuantizedLinear
from graphs.app.parity import Reference
from tests.kit.marks import slow
from tests.kit.models import build_model
from tests.kit.sessions import make_session, poisoned, refuses, tokens_of
from tests.scenarios.test_fast_prefill import eager

PROMPTS = [[5, 9, 33, 2, 61], [7], [11, 12], list(range(20, 50))]


def expected(model) -> list[list[int]]:
    reference = Reference(model)
    return [reference.generate(prompt, 8)[0] for prompt in PROMPTS]


def linears(model) -> list:
    return [layer.self_attn.kv_b_proj for layer in model.model.layers]


def check(model, wanted: list[list[int]], compiled: bool, **options) -> None:
    run = torch.compile(model, backend=eager, fullgraph=True) if compiled else model
    session = poisoned(make_session(run, **options))
    assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    assert (session.counters.num_breaks, session.counters.num_recompiles) == (0, 0)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_weights_written_in_place_are_followed(is_quantized):
    model = build_model("deepseek_v3")
    if is_quantized:
        model = quantized(model, "Float8WeightOnlyConfig")
    session = make_session(torch.compile(model, backend=eager, fullgraph=True))
    before = tokens_of(session.generate(PROMPTS, 8))
    for linear in linears(model):
        if is_quantized:
            linear.weight.scale.mul_(3)
        else:
            linear.weight.copy_(linear.weight.flip(0))
    wanted = expected(model)
    assert wanted != before
    assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    assert session.counters.num_recompiles == 0


@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_static", "fp8_group64"])
def test_our_layers_in_fp8(scheme):
    """Attention multiplies by the weight; the layer itself would round the latent to FP8 too."""
    model = build_model("deepseek_v3", kv_lora_rank=64)
    twin = copy.deepcopy(model)
    layers = zip(model.model.layers, twin.model.layers, strict=True)
    for mine, its in ((a.self_attn, b.self_attn) for a, b in layers):
        wide, amax = mine.kv_b_proj.weight, torch.tensor(4.0)
        mine.kv_b_proj = QuantizedLinear(
            mine.kv_b_proj, scheme, amax if "static" in scheme else None
        )
        its.kv_b_proj.weight.copy_(expansion(mine.kv_b_proj, wide))
        error = (its.kv_b_proj.weight - wide).norm() / wide.norm()
        assert 1e-4 < error < 2**-4
    check(model, expected(twin), compiled=False)


@pytest.mark.parametrize("block_size", [None, (16, 8)])
def test_transformers_layers_in_fp8(block_size):
    """The layers of DeepSeek-V3's own checkpoints; their product needs a GPU."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    linear = fp8.FP8Linear(20, 40, block_size)
    weight = torch.randn(40, 20)
    linear.weight.data = weight.to(torch.float8_e4m3fn)
    scale = torch.rand(linear.weight_scale_inv.shape) + 0.5
    linear.weight_scale_inv.data = scale
    found, wide = expansion(linear, weight), linear.weight.float()
    for row, column in ((0, 0), (15, 7), (16, 8), (39, 19)):
        factor = scale if block_size is None else scale[row // 16, column // 8]
        torch.testing.assert_close(found[row, column], wide[row, column] * factor)
    linear.weight.data = weight
    assert torch.equal(expansion(linear, weight), weight)


def test_hooks_and_a_forward_of_its_own_count():
    linear, like = nn.Linear(20, 40, bias=False).requires_grad_(False), torch.randn(40, 20)
    hook = linear.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(expansion(linear, like), 2 * linear.weight)
    hook.remove()
    linear.forward = lambda x: 3 * x @ linear.weight.t()
    torch.testing.assert_close(expansion(linear, like), 3 * linear.weight)
    linear.dequantized = lambda dtype: linear.weight.to(dtype)
    torch.testing.assert_close(expansion(linear, like), 3 * linear.weight)


def test_merged_projections():
    model = build_model("deepseek_v3")
    wanted = expected(model)
    assert merge_projections(model) > 0
    check(model, wanted, compiled=False)


class Packed(nn.Module):
    """Rounds a linear layer to five values, under the names of GPTQ's and AWQ's layers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scales = nn.Parameter(linear.weight.abs().amax(1) / 2, requires_grad=False)
        packed = (linear.weight / self.scales[:, None]).round().to(torch.int8)
        self.register_buffer("qweight", packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales[:, None]).t()


class CompressedLinear(nn.Linear):
    """Rounds its weight to five values, under the names of compressed-tensors' layers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        packed = Packed(linear)
        self.weight_scale = packed.scales
        self.register_buffer("weight_packed", packed.qweight)
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight_packed * self.weight_scale[:, None]).t()


def quantized(model, config_name: str):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, getattr(torchao, config_name)())
    assert type(linears(model)[0].weight) not in (nn.Parameter, torch.Tensor)
    return model


def replaced(model, kind):
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = kind(layer.self_attn.kv_b_proj)
    return model


def adapted(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["kv_b_proj", "q_b_proj"], init_lora_weights=False
    )
    torch.manual_seed(9)
    return peft.get_peft_model(model, config).eval().base_model.model


CHANGES = {
    "Float8WeightOnlyConfig": lambda m: quantized(m, "Float8WeightOnlyConfig"),
    "Int8WeightOnlyConfig": lambda m: quantized(m, "Int8WeightOnlyConfig"),
    "LoRA": adapted,
    "Packed": lambda m: replaced(m, Packed),
    "CompressedLinear": lambda m: replaced(m, CompressedLinear),
}


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        *((name, name == "Float8WeightOnlyConfig") for name in CHANGES),
        *slow(*((name, True) for name in ("Int8WeightOnlyConfig", "LoRA", "Packed"))),
    ],
)
def test_changed_weights(change, compiled):
    """Quantized by torchao, adapted by peft, or under other names."""
    model = build_model("deepseek_v3")
    plain = expected(model)
    model = CHANGES[change](model)
    wanted = expected(model)
    assert wanted != plain
    check(model, wanted, compiled)


class Clipping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-0.1, 0.1))


def test_a_layer_that_is_not_linear_is_refused():
    model = build_model("deepseek_v3")
    for linear in linears(model):
        linear.__class__ = Clipping
    refuses(
        model, "(keys|values) of model.layers.0.self_attn must be those that kv_b_proj makes of its"
    )
