"""VARLEN on a GPU: refused where torch is too old, else against the float64 oracle."""

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, varlen_attention
from attn_ops.backends import registry
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.backends.varlen import BACKEND, OLDEST_TORCH, active_implementation
from attn_ops.compat.torch_version import TORCH_VERSION
from attn_ops.metadata import AttentionMetadata

pytestmark = pytest.mark.gpu

too_old = pytest.mark.skipif(TORCH_VERSION < OLDEST_TORCH, reason="torch is too old")
RAGGED = {
    "decode": ([1] * 6, [1, 2, 16, 17, 300, 1000]),
    "mixed": ([1, 1, 0, 7, 130, 1], [5, 400, 0, 7, 300, 1]),
    "prefill": ([1, 64, 513], [1, 64, 513]),
}


def request():
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    return registry.select_backend(spec, block_size=16, device="cuda", backend="VARLEN")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {"VARLEN": "attn_ops.backends.varlen"})


@pytest.mark.skipif(TORCH_VERSION >= OLDEST_TORCH, reason="torch is new enough")
def test_old_torch_is_refused():
    with pytest.raises(ValueError, match=r"torch must be 2\.12 or later, got 2\."):
        request()


@too_old
def test_fa2_is_refused():
    if active_implementation() is not None:
        pytest.skip("an implementation was activated before")
    with pytest.raises(ValueError, match="must be FA3 for paged caches"):
        request()


@pytest.fixture
def fa3():
    from torch.nn import attention as torch_attention

    activate = getattr(torch_attention, "activate_flash_attention_impl", None)
    if activate is None:
        pytest.skip("this torch activates nothing")
    try:
        activate("FA3")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no FA3: {error}")
    missing = BACKEND.unavailable()
    if missing:
        pytest.skip(missing)
    yield
    torch_attention.restore_flash_attention_impl()


@too_old
@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 33])
def test_over_a_cache(fa3, batch, block_size, head_size, causal, window):
    query, seq = RAGGED[batch]
    width = -(-max(seq) // block_size)
    table = (torch.randperm(len(seq) * width) + 1).view(len(seq), width).int()
    written = torch.zeros(len(seq) * width + 1, block_size, dtype=torch.bool)
    for blocks, length in zip(table.long(), seq, strict=True):
        for first in range(0, length, block_size):
            written[blocks[first // block_size], : length - first] = True
    cache = torch.randn(len(seq) * width + 1, 2, block_size, 2, head_size)
    cache = cache.masked_fill(~written[:, None, :, None, None], float("nan")).bfloat16().cuda()
    common = CommonAttentionMetadata.from_lengths(
        query, seq, table, block_size, "cuda", num_padded_tokens=sum(query) + 3
    )
    common.causal = causal
    spec = AttentionSpec(8, 2, head_size, torch.bfloat16, causal=causal, sliding_window=window)
    meta = BACKEND.builder(BACKEND, [spec], block_size, "cuda").build(0, common)
    q = torch.randn(sum(query) + 3, 8, head_size, device="cuda", dtype=torch.bfloat16)
    q[sum(query) :] = float("nan")
    out = attention(q, cache, meta, head_size**-0.5, sliding_window=window)
    want = reference_attention(q, cache, common, head_size**-0.5, sliding_window=window)
    assert (out.double() - want).norm() < 1.5e-2 * want.norm()
    assert (out[sum(query) :] == 0).all()


@too_old
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 33])
def test_without_a_cache(fa3, causal, window):
    lengths = [3, 0, 1, 300, 129]
    table = torch.zeros(5, 20, dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths(
        lengths, lengths, table, 16, "cuda", num_padded_tokens=440
    )
    common.causal = causal
    q, k, v = (
        torch.randn(440, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    for x in (q, k, v):
        x[433:] = float("nan")
    meta = AttentionMetadata(common, BACKEND)
    out = varlen_attention(q, k, v, meta, 128**-0.5, sliding_window=window)
    from attn_ops.backends.torch_backend import BACKEND as REFERENCE

    meta = AttentionMetadata(common, REFERENCE)
    wide = (q.double(), k.double(), v.double())
    want = varlen_attention(*wide, meta, 128**-0.5, sliding_window=window)
    assert (out.double() - want).norm() < 1.5e-2 * want.norm()
    assert (out[433:] == 0).all()
