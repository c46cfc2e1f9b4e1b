"""Masks and scores that a user writes: numbers, refusals, selection."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from attn_ops import (
    AttentionSpec,
    attention_with_lse,
    register_backend,
    select_backend,
    varlen_attention,
    varlen_metadata,
)
from attn_ops.backends import registry
from attn_ops.backends.flex import flex_backend
from tests.attn_ops.backends.flex.masks import (
    check,
    every_third,
    nearer_is_better,
    oracle,
    prefix_lm,
    ragged,
)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [prefix_lm, every_third])
@pytest.mark.parametrize("sinks", [False, True])
def test_custom_mask(make_batch, mask, causal, sinks, compiled):
    backend = flex_backend("CUSTOM", mask)
    batch = ragged(make_batch, backend, causal=causal)
    options: dict[str, Any] = {"sinks": torch.tensor([-1.0, 0.0, 0.5, 2.0])} if sinks else {}
    attend_ = attention_with_lse
    if compiled:
        attend_ = torch.compile(attend_, backend="aot_eager", fullgraph=True, dynamic=True)
    out, lse = attend_(batch.q, batch.kv_cache, batch.meta, 0.3, **options)
    check(out, lse, *oracle(batch, options, causal, mask))


def test_custom_score(make_batch):
    backend = flex_backend("CUSTOM", prefix_lm, nearer_is_better)
    batch = ragged(make_batch, backend, causal=False)
    out, lse = attention_with_lse(batch.q, batch.kv_cache, batch.meta, 0.3)
    check(out, lse, *oracle(batch, {}, False, prefix_lm, nearer_is_better))


def test_custom_mask_without_a_cache(monkeypatch):
    """Registered, selected by name, updated between steps."""
    monkeypatch.setattr(registry, "_registered", {})
    limit = torch.zeros(3, dtype=torch.int32)
    register_backend(flex_backend("FIRST_KEYS", lambda r, q, k: k < limit[r]))
    spec = AttentionSpec(4, 2, 8, torch.float32, causal=False)
    assert select_backend(spec, block_size=16, device="cpu", backend="FIRST_KEYS")
    meta = varlen_metadata([3, 0, 20], spec, backend="FIRST_KEYS", num_padded_tokens=25)
    q, k, v = (torch.randn(25, n, 8) for n in (4, 2, 2))
    for x in (q, k, v):
        x[23:] = float("nan")
    for first, last in ((1, 20), (3, 4)):
        limit.copy_(torch.tensor([first, 0, last]))
        out = varlen_attention(q, k, v, meta, 0.3)
        for begin, end, seen in ((0, 3, first), (3, 23, last)):
            k_, v_ = (x[begin : begin + seen].repeat_interleave(2, 1) for x in (k, v))
            s = torch.einsum("qnh,cnh->nqc", q[begin:end], k_) * 0.3
            torch.testing.assert_close(
                out[begin:end], torch.einsum("nqc,cnh->qnh", s.softmax(-1), v_)
            )
        assert (out[23:] == 0).all()


def test_custom_masks_are_refused_where_positions_are_others():
    backend = flex_backend("CUSTOM", prefix_lm)
    spec = AttentionSpec(4, 2, 8, torch.float32)
    chunked = dataclasses.replace(spec, attention_chunk_size=32)
    with pytest.raises(ValueError, match=r"attention_chunk_size must be None with .*supported"):
        backend.builder(backend, [chunked], 16, "cpu")
    common = varlen_metadata([40, 50], spec).common
    with pytest.raises(ValueError, match=r"common_prefix_len must be 0 with .*supported"):
        backend.builder(backend, [spec], 16, "cpu").build(16, common)
    with pytest.raises(ValueError, match="mask must be callable, got NoneType"):
        flex_backend("CUSTOM", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="score must be callable, got int"):
        flex_backend("CUSTOM", prefix_lm, 3)  # pyright: ignore[reportArgumentType]


def test_a_mask_of_ones_own_is_only_taken_by_name(monkeypatch):
    """Unnamed even where no other backend applies: it computes something else."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_BUILT_IN", {})
    register_backend(flex_backend("CUSTOM", prefix_lm))
    spec = AttentionSpec(4, 2, 8, torch.float32)
    for measure in (False, True):
        with pytest.raises(ValueError, match="CUSTOM: its mask is its own; ask for it by name"):
            select_backend(spec, block_size=16, device="cpu", measure=measure)
    assert select_backend(spec, block_size=16, device="cpu", backend="CUSTOM")
    chunked = dataclasses.replace(spec, attention_chunk_size=32)
    with pytest.raises(ValueError, match="attention_chunk_size must be None with a custom mask"):
        select_backend(chunked, block_size=16, device="cpu", backend="CUSTOM")


SPEC = AttentionSpec(4, 2, 32, torch.float32)


def test_a_custom_mask_never_asks_for_cascade():
    """Its builder refuses common_prefix_len, so an engine that asks first must be told no."""
    backend = flex_backend("CUSTOM", lambda request, query, key: key >= 0)
    builder = backend.builder(backend, [SPEC], 16, "cpu")
    lens = np.full(16, 2, dtype=np.int32)
    assert not builder.use_cascade_attention(512, lens, 4, 2, False, False, False, 132)
