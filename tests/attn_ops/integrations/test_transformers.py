"""Transformers models on attn_ops: logits as in eager attention, refusals, merged projections."""

import pytest
import torch
from torch import nn

from attn_ops.integrations.transformers import NAME, attention_forward, attention_specs, register

transformers = pytest.importorskip("transformers")

LENGTHS = [1, 5, 13, 2]  # of prompts; the windows of the tiny models are 6 and 7
MODELS = ["llama", "qwen3", "mistral", "gemma2", "phi3"]


def test_register_is_idempotent():
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    names = []
    for _ in range(2):
        register()
        tables = AttentionInterface(), AttentionMaskInterface()
        names.append([sorted(table.valid_keys()) for table in tables])
    assert names[0] == names[1]
    assert AttentionInterface()[NAME] is attention_forward


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
        assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 2, 16)
        assert (spec.dtype, spec.soft_cap) == (torch.float32, 50.0 if name == "gemma2" else None)


def test_attention_specs_take_the_models_dtype(make_model):
    assert attention_specs(make_model().to(torch.bfloat16))[0].dtype == torch.bfloat16


def test_attention_specs_refuse(make_model):
    with pytest.raises(ValueError, match="attn_implementation must be 'attn_ops', got 'eager'"):
        attention_specs(make_model(attn_implementation="eager"))
    bare = make_model()
    bare.model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match=r"layers that attend.*got LlamaForCausalLM"):
        attention_specs(bare)


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


def test_slot_mapping_is_optional(make_model, make_prompts):
    model = make_model()
    prompts = make_prompts(model, LENGTHS)
    wanted = model(**prompts.keywords).logits
    del prompts.keywords["slot_mapping"]
    assert torch.equal(model(**prompts.keywords).logits, wanted)


TWICE = "input_ids must have shape .1, num_tokens., got a batch dimension of 2"
MASKS = [torch.ones(shape, dtype=torch.bool) for shape in ((1, 21), (1, 1, 21, 21))]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k.pop("attn_metadata"), "attn_metadata and kv_caches must be forward keywords"),
        (lambda k: k.pop("kv_caches"), "attn_metadata and kv_caches must be forward keywords"),
        (lambda k: k.update({n: k[n].repeat(2, 1) for n in ("input_ids", "position_ids")}), TWICE),
        (lambda k: k.update(attention_mask=MASKS[0]), "attention_mask must be None"),
        (lambda k: k.update(attention_mask=MASKS[1]), "attention_mask must be None"),
    ],
)
def test_keywords_that_do_not_fit(make_model, make_prompts, name, change, message):
    model = make_model(name)
    keywords = make_prompts(model, LENGTHS).keywords
    change(keywords)
    with pytest.raises(ValueError, match=message):
        model(**keywords)


def test_a_bias_that_would_be_ignored(make_model, make_prompts):
    """T5's changes the result; the operator has none."""
    model = make_model()
    keywords = make_prompts(model, LENGTHS).keywords
    q_NTH, k_KTH = torch.randn(1, 4, sum(LENGTHS), 16), torch.randn(1, 2, sum(LENGTHS), 16)
    more = {n: keywords[n] for n in ("attn_metadata", "kv_caches")} | {"position_bias": q_NTH}
    with pytest.raises(ValueError, match="position_bias"):
        attention_forward(model.model.layers[0].self_attn, q_NTH, k_KTH, k_KTH, None, **more)


def test_dropout_is_refused(make_model, make_prompts):
    model = make_model(attention_dropout=0.5).train()
    with pytest.raises(ValueError, match="dropout"):
        model(**make_prompts(model, LENGTHS).keywords)
