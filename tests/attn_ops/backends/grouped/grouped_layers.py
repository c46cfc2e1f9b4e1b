"""Layers of three geometries, backends that are groups of them, and the oracle."""

import dataclasses

import torch

from attn_ops import AttentionCGSupport, AttentionSpec, get_backend, grouped_backend
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.testing.features import LENGTHS, TOLERANCE

FULL = AttentionSpec(4, 2, 16, torch.float32)
SLIDING = dataclasses.replace(FULL, sliding_window=9)
CAPPED = dataclasses.replace(FULL, soft_cap=5.0)
CHUNKED = dataclasses.replace(FULL, attention_chunk_size=32)
LAYERS = {FULL: {}, SLIDING: {"sliding_window": 9}, CAPPED: {"soft_cap": 5.0}}
SCALE = 0.25
TORCH, FLEX = get_backend("TORCH"), get_backend("FLEX")
Level = AttentionCGSupport


def is_sliding(spec):
    return spec.sliding_window is not None


def three_groups():
    """FULL on TRITON, SLIDING on FLEX, CAPPED on TORCH."""
    return grouped_backend({is_sliding: "FLEX", CAPPED: "TORCH"}, default="TRITON")


def built(backend, common, specs=tuple(LAYERS), block_size=16, prefix=0):
    return backend.builder(backend, specs, block_size, "cpu").build(prefix, common)


def mixed_batch(make_batch, name="mixed", **options):
    query, seq = LENGTHS[name]
    return make_batch(query, seq, head_size=16, block_size=16, num_padding_rows=2, **options)


def check(out, lse, batch, options):
    want_lse = torch.empty(batch.q.shape[:2])
    want = reference_attention(
        batch.q, batch.kv_cache, batch.common, SCALE, lse=want_lse, **options
    )
    assert out.isfinite().all()
    assert (out.double() - want).norm() <= TOLERANCE[out.dtype] * want.norm()
    assert (out[batch.common.num_actual_tokens :] == 0).all()
    if lse is not None:
        torch.testing.assert_close(lse, want_lse, atol=3e-5, rtol=0)
