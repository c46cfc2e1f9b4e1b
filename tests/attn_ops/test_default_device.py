"""Tensors of the host stand on the CPU, whatever torch's default device is."""

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    CommonAttentionMetadata,
    PagedKVCache,
    attention,
    mla_attention,
    varlen_attention,
    varlen_metadata,
    write_kv,
)
from tests.kit.batches import build_metadata
from tests.kit.latent import build_latent_batch

SPEC = AttentionSpec(4, 2, 32, torch.float32)


def paged(x):
    cache = PagedKVCache([SPEC], num_tokens=64, device="cpu")
    for request, length in {"a": 5, "b": 30}.items():
        cache.reserve(request, length)
    common = CommonAttentionMetadata.from_lengths(
        [4, 8], [5, 30], cache.block_table(["a", "b"]), 16
    )
    meta = build_metadata("TORCH", common, SPEC)
    write_kv(x[:, :2], x[:, 2:], cache.tensors[0], meta)
    return attention(x, cache.tensors[0], meta, 0.3)


def own_keys(x):
    meta = varlen_metadata([4, 8], SPEC, backend="TORCH")
    return varlen_attention(x, x[:, :2], x[:, 2:], meta, 0.3)


def latent(x):
    """Decodes behind prefills, whose rows are gathered."""
    with torch.device("cpu"):
        b = build_latent_batch([30, 1, 20, 1], [60, 5, 20, 9])
    meta = build_metadata(b.meta.backend, b.common, list(b.meta.plans), 4)
    return mla_attention(b.q, b.kv_cache, meta, *b.arguments[3:], **b.keywords)


@pytest.mark.parametrize("call", [paged, own_keys, latent])
def test_default_device(call):
    x = torch.randn(12, 4, 32)
    want = call(x)
    torch.set_default_device("meta")
    try:
        assert torch.equal(call(x), want)
    finally:
        torch.set_default_device(None)
