"""Transformers models on attn_ops: logits as in eager attention, refusals, merged projections."""

import copy

import pytest
import torch
from torch import nn

from attn_ops.integrations.merged import MergedSlice, merge_projections
from attn_ops.integrations.transformers import NAME, attention_forward, attention_specs, register

transformers = pytest.importorskip("transformers")

LENGTHS = [1, 5, 13, 2]  # of prompts; the windows of the tiny models are 6 and 7
MODELS = ["llama", "qwen3", "mistral", "gemma2", "phi3"]


def test_register_is_idempotent():
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    register()
    names = sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys())
    register()
    assert (
        sorted(AttentionInterface().valid_keys()),
        sorted(AttentionMaskInterface().valid_keys()),
    ) == names
    assert AttentionInterface()[NAME] is attention_forward


# -- geometry --------------------------------------------------------------------------------------

WINDOWS = {
    "llama": [None] * 4,
    "qwen3": [None] * 4,
    "mistral": [6] * 4,
    "gemma2": [6, None] * 2,
    "phi3": [7] * 4,
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_specs(make_model, name):
    specs = attention_specs(make_model(name, num_layers=4))
    assert [s.sliding_window for s in specs] == WINDOWS[name]
    for spec in specs:
        assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.dtype) == (
            4,
            2,
            16,
            torch.float32,
        )
        assert spec.soft_cap == (50.0 if name == "gemma2" else None)


def test_attention_specs_take_the_models_dtype(make_model):
    assert attention_specs(make_model().to(torch.bfloat16))[0].dtype == torch.bfloat16


def test_attention_specs_refuse(make_model):
    with pytest.raises(ValueError, match="attn_implementation must be 'attn_ops', got 'eager'"):
        attention_specs(make_model(attn_implementation="eager"))
    bare = make_model()
    bare.model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match=r"model must have attention layers.*got LlamaForCausalLM"):
        attention_specs(bare)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_prefill_logits_are_those_of_eager_attention(make_model, make_prompts, name, compiled):
    model = make_model(name)
    reference = make_model(name, attn_implementation="eager")
    reference.load_state_dict(model.state_dict())
    prompts = make_prompts(model, LENGTHS)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    logits = run(**prompts.keywords).logits[0].split(LENGTHS)
    for ids, got in zip(prompts.token_ids, logits, strict=True):
        wanted = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert wanted.std() > 0.01


def test_query_pre_attn_scalar_matters(make_model, make_prompts):
    """Gemma 2 scales by query_pre_attn_scalar ** -0.5, not by the head size."""
    one, other = make_model("gemma2"), make_model("gemma2", query_pre_attn_scalar=400)
    prompts = make_prompts(one, LENGTHS)
    first = one(**prompts.keywords).logits
    assert not torch.allclose(first, other(**prompts.keywords).logits, atol=1e-3)


def test_slot_mapping_is_optional(make_model, make_prompts):
    model = make_model()
    prompts = make_prompts(model, LENGTHS)
    wanted = model(**prompts.keywords).logits
    del prompts.keywords["slot_mapping"]
    assert torch.equal(model(**prompts.keywords).logits, wanted)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["attn_metadata", "kv_caches"])
def test_missing_keywords(make_model, make_prompts, missing):
    model = make_model()
    keywords = make_prompts(model, LENGTHS).keywords
    del keywords[missing]
    with pytest.raises(ValueError, match="attn_metadata and kv_caches must be forward keywords"):
        model(**keywords)


def test_batch_dimension(make_model, make_prompts):
    model = make_model()
    keywords = make_prompts(model, LENGTHS).keywords
    keywords |= {name: keywords[name].repeat(2, 1) for name in ("input_ids", "position_ids")}
    with pytest.raises(
        ValueError, match=r"input_ids must have shape \[1, num_tokens\], got a batch dimension of 2"
    ):
        model(**keywords)


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attention_mask(make_model, make_prompts, rank, name):
    model = make_model(name)
    num_tokens = sum(LENGTHS)
    shape = (1, num_tokens) if rank == 2 else (1, 1, num_tokens, num_tokens)
    keywords = make_prompts(model, LENGTHS).keywords | {
        "attention_mask": torch.ones(shape, dtype=torch.bool)
    }
    with pytest.raises(ValueError, match="attention_mask must be None"):
        model(**keywords)


@pytest.mark.parametrize("keyword", ["position_bias"])
def test_features_that_would_be_ignored(make_model, make_prompts, keyword):
    """Sinks (gpt-oss) and a bias (T5) change the result; the operator has neither."""
    model = make_model()
    keywords = make_prompts(model, LENGTHS).keywords
    q_NTH, k_KTH = torch.randn(1, 4, sum(LENGTHS), 16), torch.randn(1, 2, sum(LENGTHS), 16)
    more = {n: keywords[n] for n in ("attn_metadata", "kv_caches")} | {keyword: torch.randn(4)}
    with pytest.raises(ValueError, match=keyword):
        attention_forward(model.model.layers[0].self_attn, q_NTH, k_KTH, k_KTH, None, **more)


def test_dropout_is_refused(make_model, make_prompts):
    model = make_model(attention_dropout=0.5).train()
    with pytest.raises(ValueError, match="dropout"):
        model(**make_prompts(model, LENGTHS).keywords)


# -- merged projections ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups"), [("llama", 4), ("qwen3", 4), ("gemma2", 4), ("phi3", 0)]
)
def test_merging_changes_no_eager_number_and_no_key(make_model, make_prompts, name, groups):
    model = make_model(name)
    keywords = make_prompts(model, LENGTHS).keywords
    state, wanted = copy.deepcopy(model.state_dict()), model(**keywords).logits
    names = [n for n, _ in model.named_parameters()]
    assert merge_projections(model) == groups
    assert torch.equal(model(**keywords).logits, wanted)
    after = model.state_dict()
    assert list(after) == list(state)
    assert [n for n, _ in model.named_parameters()] == names
    assert all(torch.equal(after[n], state[n]) for n in state)
    assert merge_projections(model) == 0, "merging again changes nothing"


@pytest.mark.parametrize("bias", [False, True])
def test_in_place_updates_reach_the_merged_product(make_model, make_prompts, bias):
    model = make_model(attention_bias=bias)
    keywords = make_prompts(model, LENGTHS).keywords
    assert merge_projections(model) == 4
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = compiled(**keywords).logits
    torch.testing.assert_close(before, model(**keywords).logits, atol=1e-5, rtol=1e-5)
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight.data.mul_(2)
    if bias:
        attention.v_proj.bias.data.add_(1)
    model.model.layers[0].mlp.up_proj.weight.data.normal_()
    after = compiled(**keywords).logits
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, model(**keywords).logits, atol=1e-5, rtol=1e-5)
    other = make_model(attention_bias=bias)
    other.lm_head.weight.data.mul_(0.5)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(
        compiled(**keywords).logits, other(**keywords).logits, atol=1e-5, rtol=1e-5
    )


class Projections(nn.Module):
    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q, k, v


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


UNLIKE = {
    "no such layers": nn.Sequential(nn.Linear(4, 4)),
    "one is missing": nn.ModuleDict({"gate_proj": nn.Linear(4, 4)}),
    "bias": Projections(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)),
    "input size": Projections(nn.Linear(4, 4), nn.Linear(5, 4), nn.Linear(4, 4)),
    "dtype": Projections(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4)),
    "device": Projections(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)),
    "subclass": Projections(nn.Linear(4, 4), Scaled(4, 4), nn.Linear(4, 4)),
    "hook": Projections(nn.Linear(4, 4), hooked(), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_other_layers_are_left_alone(case):
    model = UNLIKE[case]
    before = dict(model.named_modules())
    assert merge_projections(model) == 0
    assert dict(model.named_modules()) == before
    assert not any(isinstance(m, MergedSlice) for m in model.modules())


def test_a_copy_of_a_merged_model_is_merged_too():
    """Updates of the copy's weights reach the copy's product, and not the original's."""
    x = torch.randn(2, 4)
    model = Projections(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(False)
    merge_projections(model)
    twin = copy.deepcopy(model)
    twin.k_proj.weight.data.mul_(3)
    wanted = twin.k_proj(x)
    torch.testing.assert_close(torch.compile(twin.k_proj, backend="aot_eager")(x), wanted)
    torch.testing.assert_close(torch.compile(model.k_proj, backend="aot_eager")(x), model.k_proj(x))
