"""Gemma 3n and Gemma 4, whose last layers read the KV caches of earlier ones, in sessions."""

from typing import Any

import pytest
import torch
from torch import nn

import fx_passes
from attn_ops import write_kv
from attn_ops.compat.torch_version import TORCH_VERSION
from attn_ops.integrations.transformers import attention_specs, cache_index
from attn_ops.integrations.transformers import forward as integration
from tests.kit.marks import long, slow
from tests.scenarios.test_families import check_random_batches

FAMILIES = ["gemma3n", "gemma4"]
MODES = {
    "called": {"cudagraph_mode": "NONE"},
    "eager_replay": {"cudagraph_mode": "FULL_DECODE_ONLY", "debug": "eager_replay"},
}
# On a CPU, torch before 2.13 asks of a concatenation whether its channels are last (RoPE's halves),
# and so guards on T > 1.
MORE_GRAPHS = int(TORCH_VERSION < (2, 13))


@pytest.fixture(scope="module")
def make_sharing(make_model):
    """Tied, the models repeat their last token."""
    return lambda name, **overrides: make_model(name, tie_word_embeddings=False, **overrides)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sessions_equal_transformers(make_sharing, family, mode):
    model = make_sharing(family)
    session, outputs = check_random_batches(model, model, 4, family, **MODES[mode])
    assert len(session.cache.tensors) == 3  # of five layers
    tokens = {token for row in outputs for token in row}
    assert len(tokens) > 24, "a model that repeats itself agrees with any other that does"


@pytest.mark.parametrize("family", [*slow("gemma4"), *long("gemma3n")])
def test_compiled_sessions_equal_transformers(make_sharing, family):
    """One graph for steps of one row and of many, called and through the capture path."""
    model = make_sharing(family)
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    for mode in MODES.values():
        check_random_batches(model, compiled, 4, family, MORE_GRAPHS, **mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"num_kv_shared_layers": 0},
        {"num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 3,
         "num_hidden_layers": 6},
    ],
    ids=["values_of_keys", "none_shares", "more_share"],
)  # fmt: skip
def test_variants_of_gemma4(make_sharing, overrides):
    model = make_sharing("gemma4", **overrides)
    check_random_batches(model, model, 4, "gemma4", cudagraph_mode="NONE")


# -- which cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_specs_and_indices(make_sharing, family):
    model = make_sharing(family)
    size = 32 if family == "gemma4" else 16
    specs = attention_specs(model)
    assert [(s.head_size, s.sliding_window) for s in specs] == [(16, 6), (16, 6), (size, None)]
    assert [cache_index(layer.self_attn) for layer in model.model.layers] == [0, 1, 2, 1, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_sharers_write_nothing_and_read_no_keys(make_sharing, make_prompts, monkeypatch, family):
    """Keys and values that reach a sharing layer may be anything."""
    model = make_sharing(family)
    prompts, written = make_prompts(model, [1, 7, 3]), []
    wanted = model(**prompts.keywords).logits
    plain = integration.attention_forward

    def poisoned(module, query, key: Any, value: Any, *args, **kwargs):
        if module.is_kv_shared_layer:
            key = value = None
        return plain(module, query, key, value, *args, **kwargs)

    def counted(k, v, kv_cache, *args, **kwargs):
        written.append(kv_cache.data_ptr())
        write_kv(k, v, kv_cache, *args, **kwargs)

    from transformers import AttentionInterface

    monkeypatch.setattr(integration, "write_kv", counted)
    monkeypatch.setitem(AttentionInterface._global_mapping, "attn_ops", poisoned)
    assert torch.equal(model(**prompts.keywords).logits, wanted)
    assert written == [cache.data_ptr() for cache in prompts.caches]


def test_every_row_is_computed_whatever_logits_are_kept(make_sharing, make_prompts):
    """Asked for a number of logits, Gemma 4 would go on with the last rows of the batch alone."""
    model = make_sharing("gemma4")
    prompts = make_prompts(model, [1, 7, 3])
    logits = model(**prompts.keywords).logits
    last = model(**prompts.keywords, logits_to_keep=1).logits
    torch.testing.assert_close(last, logits[:, -1:], atol=1e-5, rtol=1e-5)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("head_dim", 8, "head_size of layer 3 must be 16, that of layer 1, whose .* got 8"),
        ("num_key_value_groups", 4, "num_kv_heads of layer 3 must be 2, that of layer 1"),
        ("sliding_window", None, "sliding_window of layer 3 must be 6, that of layer 1"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_geometry_is_refused(make_sharing, family, attribute, value, message):
    model = make_sharing(family)
    setattr(model.model.layers[3].self_attn, attribute, value)
    with pytest.raises(ValueError, match=message):
        attention_specs(model)


def test_other_scales_are_refused(make_sharing):
    model = make_sharing("gemma4")
    layers = [layer.self_attn for layer in model.model.layers]
    layers[1].k_scale = nn.Buffer(torch.tensor([0.5]))
    attention_specs(model)
    with pytest.raises(ValueError, match="k_scale of layer 3 must be that of layer 1"):
        attention_specs(model, "fp8_e4m3")
    layers[3].k_scale = nn.Buffer(torch.tensor([0.5]))
    assert len(attention_specs(model, "fp8_e4m3")) == 3


def test_a_layer_type_without_owner_is_refused(make_sharing):
    model = make_sharing("gemma4")
    sharer = model.model.layers[3].self_attn
    sharer.layer_type = "chunked_attention"
    with pytest.raises(ValueError, match="layer 3 must share the cache of an earlier chunked_"):
        attention_specs(model)


def test_too_few_caches(make_sharing, make_prompts):
    keywords = make_prompts(model := make_sharing("gemma3n"), [3]).keywords
    keywords["kv_caches"] = keywords["kv_caches"][:2]
    with pytest.raises(ValueError, match="got 2 for layer 2, which takes number 2"):
        model(**keywords)
