"""TORCH's fast path against the float64 reference, over random ragged batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops import AttentionSpec, attention, get_backend
from attn_ops.backends import torch_backend, torch_sdpa
from attn_ops.backends.torch_backend import reference_attention
from tests.attn_ops.backends.paged import make_paged

BACKEND = get_backend("TORCH")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SCALE = 0.3


@st.composite
def batches(draw):
    """Query lengths and seq_lens: often alike, so that buckets hold several requests."""
    queries = st.sampled_from([0, 1, 1, 1, 2, 5, 17])
    lengths = []
    for query in draw(st.lists(queries, max_size=6)):
        before = draw(st.sampled_from([0, 0, 1, 15, 16, 30, 31, 33, 70]))
        lengths.append((query, query + before))
    padding_requests = draw(st.integers(0, 2))
    return lengths + [(1, 0)] * padding_requests


def make(lengths, spec, block_size, seed):
    """(q, cache, metadata); blocks that do not exist wherever no request has written."""
    query, seq = [pair[0] for pair in lengths], [pair[1] for pair in lengths]
    q, cache, common = make_paged(query, seq, spec, block_size, seed=seed)
    for row, length in zip(common.block_table_tensor, seq, strict=True):
        row[-(-length // block_size) :] = 2**30
    return q, cache, BACKEND.builder(BACKEND, [spec], block_size, "cpu").build(0, common)


def check(out, want, dtype):
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert (out.double() - want).norm() <= TOLERANCE[dtype] * want.norm()
    rows = (out.double() - want).flatten(1).norm(dim=1)
    assert (rows <= 3 * TOLERANCE[dtype] * want.flatten(1).norm(dim=1) + 1e-6).all()


@settings(max_examples=150, deadline=None)
@given(
    lengths=batches(),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([None, None, 1, 9]),
    alibi=st.booleans(),
    causal=st.booleans(),
    kv_cache_dtype=st.sampled_from(["auto", "auto", "fp8_e4m3", "fp8_e5m2"]),
    folded_rows=st.sampled_from([0, 64]),
    masked_rows=st.sampled_from([4, 256]),
    seed=st.integers(0, 99),
)
def test_random_batches(
    lengths, heads, dtype, block_size, window, alibi, causal, kv_cache_dtype, folded_rows,
    masked_rows, seed,
):  # fmt: skip
    asked = {"alibi": alibi, "causal": causal, "kv_cache_dtype": kv_cache_dtype}
    spec = AttentionSpec(*heads, 8, dtype, window, **asked)
    q, cache, meta = make(lengths, spec, block_size, seed)
    options: dict[str, Any] = {"sliding_window": window, "kv_cache_dtype": kv_cache_dtype}
    if alibi:
        options["alibi_slopes"] = torch.linspace(0.02, 0.5, heads[0])
    if kv_cache_dtype != "auto":
        options |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([1.7])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "FOLDED_ROWS", folded_rows)
        patch.setattr(torch_sdpa, "MASKED_ROWS", masked_rows)
        patch.setattr(torch_backend, "attend_batch", None)
        out = attention(q, cache, meta, SCALE, **options)
    check(out, reference_attention(q, cache, meta.common, SCALE, **options), dtype)


def test_prompt_of_many_rows():
    """Rows in several parts under a mask, and the triangle without one."""
    for lengths in ([(600, 600)], [(300, 700), (300, 650)], [(1, 5000), (1, 4999), (1, 1)]):
        spec = AttentionSpec(4, 2, 16, torch.bfloat16)
        q, cache, meta = make(lengths, spec, 16, 1)
        want = reference_attention(q, cache, meta.common, SCALE)
        check(attention(q, cache, meta, SCALE), want, torch.bfloat16)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_turns_scores_around(scale):
    """PyTorch's own triangle makes NaN of it."""
    q, cache, meta = make([(6, 6)], AttentionSpec(2, 1, 16, torch.float32), 4, 1)
    want = reference_attention(q, cache, meta.common, scale)
    check(attention(q, cache, meta, scale), want, torch.float32)


def test_what_stays_with_the_reference(monkeypatch):
    """Soft cap, sinks, the log-sum-exp and float64; and the oracle in every case."""
    monkeypatch.setattr(torch_sdpa, "forward", None)
    kept: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float64, {}),
        (torch.float32, {"soft_cap": 5.0}),
        (torch.float32, {"sinks": torch.linspace(-2, 3, 4)}),
    ]
    for dtype, options in kept:
        spec = AttentionSpec(
            4, 2, 16, dtype, soft_cap=options.get("soft_cap"), sinks="sinks" in options
        )
        q, cache, meta = make([(1, 9), (3, 20)], spec, 16, 2)
        out = attention(q, cache, meta, SCALE, **options).double()
        want = reference_attention(q, cache, meta.common, SCALE, **options)
        assert (out - want).norm() <= 1e-5 * want.norm()


def test_buckets():
    """One query length, keys alike within a quarter, and no more of them than fit the cache."""
    starts = [0, 1, 2, 3, 3, 4, 14, 15]
    found = list(torch_sdpa.buckets(starts, [512, 505, 300, 40, 0, 10, 450]))
    assert [(b.requests, b.num_queries, b.width) for b in found] == [
        ([0, 1, 6], 1, 512),
        ([2], 1, 300),
        ([5], 10, 10),
    ]
    many = torch_sdpa.buckets(list(range(101)), [1000] * 100)
    assert max(len(b.requests) for b in many) == torch_sdpa.BUCKET_TOKENS // 1024
    long = torch_sdpa.buckets(list(range(4)), [9999] * 3)
    assert [b.requests for b in long] == [[0], [1], [2]]
