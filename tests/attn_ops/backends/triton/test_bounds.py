"""TRITON where a captured launch is replayed with requests longer than it was captured for."""

import pytest
import torch

from attn_ops import CommonAttentionMetadata
from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.backends.triton import BACKEND

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")


def test_keys_beyond_the_scratch_stay_with_their_request():
    """`max_seq_len` sizes the gathered rows: an overrun must not read the next request's."""
    from attn_ops.backends.triton.prefill import Launch, prefill_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.arange(1, 31, dtype=torch.int32).view(2, 15)
    common = CommonAttentionMetadata.from_lengths([4, 4], [200, 100], table, 16, device)
    kv_cache = torch.randn(31, 2, 16, 1, 16, device=device)
    kv_cache[16:, 1] += 100.0  # values of request 1
    q = torch.randn(8, 2, 16, device=device)
    launch = Launch(32, 32, 4, 1, gather=True)
    captured = common.replace(max_seq_len=128)
    lens = common.seq_lens.to(device)
    assert lens.max() > captured.max_seq_len
    out = prefill_attention(q, kv_cache, captured, AttentionOptions(0.25), launch)
    want = reference_attention(q, kv_cache, common, 0.25)
    torch.testing.assert_close(out[4:].double(), want[4:], rtol=1e-4, atol=1e-4)
    assert out[:4].abs().max() < 10.0
