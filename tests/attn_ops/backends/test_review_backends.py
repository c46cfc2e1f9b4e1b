"""Defects that a review of the backends found (2026-11-21)."""

import dataclasses
import types

import numpy as np
import pytest
import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    attention,
    attention_with_lse,
    get_backend,
    register_backend,
    select_backend,
    varlen_attention,
    varlen_metadata,
)
from attn_ops.backends import registry
from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.flash_attn import BACKEND as FLASH_ATTN
from attn_ops.backends.flash_attn import library
from attn_ops.backends.flex import flex_backend
from attn_ops.backends.measure import MeasuredShape
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.backends.triton import BACKEND as TRITON
from attn_ops.backends.xformers_backend import BACKEND as XFORMERS
from attn_ops.backends.xformers_backend import forward as xformers_forward
from attn_ops.integrations import transformers as integration
from attn_ops.metadata import AttentionMetadata

SPEC = AttentionSpec(4, 2, 32, torch.float32)
INTERPRETED = pytest.mark.skipif(TRITON.unavailable() is not None, reason="needs TRITON_INTERPRET")


def batch(query=(3, 1), seq=(40, 20), dtype=torch.float32):
    """q [T, 4, 32], a cache [P, 2, 16, 2, 32] and the batch."""
    table = torch.arange(1, 1 + 3 * len(seq), dtype=torch.int32).view(len(seq), 3)
    common = CommonAttentionMetadata.from_lengths(list(query), list(seq), table, 16)
    cache = torch.randn(1 + 3 * len(seq), 2, 16, 2, 32).to(dtype)
    return torch.randn(sum(query), 4, 32).to(dtype), cache, common


def built(name, common, spec=SPEC, prefix=0):
    backend = get_backend(name)
    return backend.builder(backend, [spec], 16, "cpu").build(prefix, common)


def no_keys(name, query, keys, **spec):
    """A non-causal batch of one request whose keys are not its rows, as in cross-attention."""
    q, cache, _ = batch((query,), (48,))
    common = CommonAttentionMetadata.from_lengths(
        [query], [query], torch.arange(1, 4, dtype=torch.int32)[None], 16
    ).replace(
        seq_lens=torch.tensor([keys], dtype=torch.int32),
        seq_lens_cpu=torch.tensor([keys], dtype=torch.int32),
        num_computed_tokens_cpu=None,
        causal=False,
    )
    asked = AttentionSpec(4, 2, 32, torch.float32, causal=False, **spec)
    return q, cache, built(name, common, asked)


# -- wrong numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2**31 - 1, 2**31])
@pytest.mark.parametrize("causal", [True, False])
def test_flex_takes_windows_that_do_not_fit_int32(window, causal):
    q, cache, common = batch()
    common.causal = causal
    want = reference_attention(q, cache, common, 0.2)
    got = attention(q, cache, built("FLEX", common), 0.2, sliding_window=window)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_flex_sinks_of_minus_infinity_leave_padding_requests_zero():
    q, cache, common = batch((1, 1), (20, 20))
    lens = torch.tensor([20, 0], dtype=torch.int32)
    common = common.replace(seq_lens=lens, seq_lens_cpu=lens, num_computed_tokens_cpu=None)
    spec = AttentionSpec(4, 2, 32, torch.float32, sinks=True)
    sinks = torch.full((4,), float("-inf"))
    out = attention(q, cache, built("FLEX", common, spec), 0.2, sinks=sinks)
    assert not out[1].any()


def test_torch_rows_that_see_no_key_are_zero():
    q, cache, meta = no_keys("TORCH", 12, 4, sliding_window=3)
    out, lse = attention_with_lse(q, cache, meta, 0.2, sliding_window=3)
    assert not out[0].any()
    assert (lse[0] == float("-inf")).all()


@INTERPRETED
@pytest.mark.parametrize("which", ["q", "kv_cache"])
def test_xformers_refuses_heads_that_are_not_contiguous(which):
    """TRITON does; its kernels, called here without its checks, read other elements."""
    q, cache, common = batch((3, 5), (40, 20), torch.float16)
    if which == "q":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        cache = cache.transpose(3, 4).contiguous().transpose(3, 4)
    meta = AttentionMetadata(common, XFORMERS, {}, 16)
    with pytest.raises(ValueError, match=f"{which}"):
        xformers_forward(q, cache, meta, AttentionOptions(0.2))


def test_cascade_leaves_padding_rows_zero():
    """Rows behind query_start_loc[-1] that num_actual_tokens counts; `validate` allows them."""
    q, cache, common = batch((1, 1), (40, 40))
    common.block_table_tensor[1, 0] = common.block_table_tensor[0, 0]
    slots = torch.cat([common.slot_mapping, torch.full((2,), -1)])
    common = common.replace(num_actual_tokens=4, slot_mapping=slots, positions=None)
    common.validate(block_size=16)
    q = torch.cat([q, torch.randn(2, 4, 32)])
    assert not attention(q, cache, built("TORCH", common), 0.2)[2:].any()
    assert not attention(q, cache, built("TORCH", common, prefix=16), 0.2)[2:].any()


# -- chosen and not able ---------------------------------------------------------------------------


def test_measuring_leaves_out_backends_with_a_mask_of_their_own():
    """Such a backend computes something else than the layers ask for, as one that quantizes q."""
    register_backend(flex_backend("NOTHING_SEEN", lambda request, query, key: key < 0))
    try:
        chosen = select_backend(
            SPEC, block_size=16, device="cpu", measure=True, shapes=[MeasuredShape(1, 1, 16)]
        )
    finally:
        registry._registered.pop("NOTHING_SEEN")
    assert "NOTHING_SEEN" not in chosen.why


def test_a_custom_mask_never_asks_for_cascade():
    """Its builder refuses common_prefix_len, so an engine that asks first must be told no."""
    backend = flex_backend("CUSTOM", lambda request, query, key: key >= 0)
    builder = backend.builder(backend, [SPEC], 16, "cpu")
    lens = np.full(16, 2, dtype=np.int32)
    assert not builder.use_cascade_attention(512, lens, 4, 2, False, False, False, 132)


def test_a_custom_mask_is_refused_chunks_when_it_is_selected():
    backend = flex_backend("CUSTOM", lambda request, query, key: key >= 0)
    spec = AttentionSpec(4, 2, 32, torch.float32, attention_chunk_size=16)
    assert backend.reasons_against(spec, 16, torch.device("cpu"))


@pytest.mark.parametrize(("name", "sinks"), [("flash_attn", False), ("flash_attn_interface", True)])
def test_flash_attn_knows_what_upstream_libraries_refuse(monkeypatch, name, sinks):
    """`forward` refuses paged attention with upstream FA2, and sinks with upstream FA3."""
    fake = types.SimpleNamespace(flash_attn_varlen_func=None, flash_attn_with_kvcache=None)
    monkeypatch.setattr(library, "find_library", lambda: (name, fake))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for function in (library.fa_version, library.unavailable):
        function.cache_clear()
    try:
        spec = AttentionSpec(8, 2, 128, torch.bfloat16, sinks=sinks)
        reasons = FLASH_ATTN.reasons_against(spec, 16, torch.device("cuda"))
    finally:
        for function in (library.fa_version, library.unavailable):
            function.cache_clear()
    assert reasons


def test_chunks_that_are_no_whole_blocks_are_refused_when_the_builder_is_made():
    """Not by every step's build, under a name that the caller has never seen."""
    backend = get_backend("TORCH")
    spec = AttentionSpec(4, 2, 32, torch.float32, attention_chunk_size=24)
    with pytest.raises(ValueError, match="attention_chunk_size"):
        backend.builder(backend, [spec], 16, "cpu")


# -- refusals --------------------------------------------------------------------------------------


def test_varlen_metadata_refuses_chunks():
    """`varlen_attention` has none: every row would see all keys."""
    with pytest.raises(ValueError, match="attention_chunk_size"):
        varlen_metadata([40], AttentionSpec(4, 2, 32, torch.float32, attention_chunk_size=16))


def test_attention_over_a_cache_refuses_metadata_without_one():
    """Its table is zeros: the null block would be read as every request's keys."""
    q, cache, _ = batch()
    with pytest.raises(ValueError, match="meta"):
        attention(q, cache, varlen_metadata([3, 1], SPEC), 0.2)


def test_soft_cap_must_be_finite():
    with pytest.raises(ValueError, match="soft_cap"):
        AttentionSpec(4, 2, 32, torch.float32, soft_cap=float("inf"))


def test_attention_with_lse_takes_the_arguments_of_attention():
    q, cache, common = batch()
    out, _ = attention_with_lse(q, cache, built("TORCH", common), 0.2, v_head_size=8)
    assert out.shape == (4, 4, 8)


def test_a_strided_vector_is_named_as_such():
    """Not 'must be torch.float32 of shape [4], got torch.float32 [4]'."""
    q, cache, common = batch()
    with pytest.raises(ValueError, match="contiguous"):
        attention(q, cache, built("TORCH", common), 0.2, alibi_slopes=torch.rand(8)[::2])


def test_auto_takes_its_arguments_by_name():
    auto = get_backend("AUTO")
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    builder = auto.builder(backend=auto, specs=[spec], block_size=16, device="cuda")
    assert builder.specs == (spec,)


def test_no_heads_are_a_value_error():
    q, cache, common = batch()
    none = torch.randn(4, 0, 32)
    with pytest.raises(ValueError, match="k and v"):
        varlen_attention(q, none, none, varlen_metadata([3, 1], SPEC), 0.2)
    with pytest.raises(ValueError, match="q must"):
        attention(none, cache, built("TORCH", common), 0.2)


def test_a_compiled_encoder_refuses_a_causal_batch_as_an_eager_one_does():
    """Eager raises; compiled, every row silently sees no later one."""
    transformers = pytest.importorskip("transformers")
    integration.register()
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=16,
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="attn_ops").eval()
    model.requires_grad_(False)
    spec = dataclasses.replace(integration.attention_specs(model)[0], causal=True)
    keywords = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "position_ids": torch.arange(3)[None],
        "attn_metadata": varlen_metadata([3], spec),
    }
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="causal"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**keywords)
