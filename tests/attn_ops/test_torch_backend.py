"""TORCH against a loop over tokens and heads in float64, written down here independently of it."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_ops import attention
from attn_ops.backends.torch_backend import reference_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def brute_force(
    b, scale: float, sliding_window: int | None, soft_cap: float | None
) -> torch.Tensor:
    """[T, N, H] float64: one query row and one head at a time, one key at a time."""
    common, block_size = b.common, b.kv_cache.shape[2]
    num_heads, num_kv_heads = b.q.shape[1], b.kv_cache.shape[3]
    out_TNH = torch.zeros(b.q.shape, dtype=torch.float64)
    row = 0
    for request, num_cached in enumerate(common.seq_lens.tolist()):
        num_queries = int(common.query_start_loc[request + 1]) - row
        for query in range(num_queries):
            position = num_cached - num_queries + query
            for head in range(num_heads):
                scores, values = [], []
                for key in range(num_cached):
                    if (common.causal and key > position) or (
                        sliding_window and position - key >= sliding_window
                    ):
                        continue
                    block = int(common.block_table_tensor[request, key // block_size])
                    k_H, v_H = b.kv_cache[
                        block, :, key % block_size, head // (num_heads // num_kv_heads)
                    ].double()
                    score = scale * float(b.q[row, head].double() @ k_H)
                    scores.append(
                        score if soft_cap is None else soft_cap * math.tanh(score / soft_cap)
                    )
                    values.append(v_H)
                weights = [math.exp(s - max(scores)) for s in scores]
                out_TNH[row, head] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(
                    weights
                )
            row += 1
    return out_TNH


@functools.cache
def compiled_attention():
    """One compiled function for all examples. dynamic=True: a new batch is a new shape only."""
    return torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)


CASES = {
    "lengths": st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=4),
    "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)]),
    "head_size": st.sampled_from([1, 3, 8]),
    "block_size": st.sampled_from([1, 3, 4, 16]),
    "sliding_window": st.sampled_from([None, None, 1, 2, 5, 100]),
    "soft_cap": st.sampled_from([None, 0.5, 30.0]),
    "causal": st.sampled_from([True, True, False]),
    "dtype": st.sampled_from(list(TOLERANCE)),
    "num_padding_rows": st.integers(0, 3),
    "seed": st.integers(0, 1000),
}


@pytest.mark.parametrize("compiled", [False, True])
def test_against_brute_force(make_batch, compiled):
    @settings(
        max_examples=40 if compiled else 100,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(**CASES)
    def check(
        lengths,
        heads,
        head_size,
        block_size,
        sliding_window,
        soft_cap,
        causal,
        dtype,
        num_padding_rows,
        seed,
    ):
        b = make_batch(
            [q for q, _ in lengths],
            [q + computed for q, computed in lengths],
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
            causal=causal,
            num_padding_rows=num_padding_rows,
            seed=seed,
        )
        scale = head_size**-0.5
        wanted = brute_force(b, scale, sliding_window, soft_cap)
        oracle = reference_attention(b.q, b.kv_cache, b.common, scale, sliding_window, soft_cap)
        torch.testing.assert_close(oracle, wanted, atol=1e-12, rtol=1e-12)
        attend = compiled_attention() if compiled else attention
        if compiled:
            torch._dynamo.reset()  # each geometry is a new graph; Dynamo gives up after eight
        out = attend(
            b.q, b.kv_cache, b.meta, scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )

    check()


def test_large_scores_do_not_overflow(make_batch):
    b = make_batch([2, 1], [9, 4])
    b.q *= 1e4
    wanted = brute_force(b, 1.0, None, None)
    out = attention(b.q, b.kv_cache, b.meta, 1.0)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)


def test_padding_requests_of_a_captured_batch_are_zero(make_batch):
    """A query row whose request has nothing in the cache: seq_len 0."""
    b = make_batch([1, 1], [5, 1])
    seq_lens = torch.tensor([5, 0], dtype=torch.int32)
    b.meta.common = dataclasses.replace(b.common, seq_lens=seq_lens, seq_lens_cpu=seq_lens)
    out = attention(b.q, b.kv_cache, b.meta, 1.0)
    wanted = reference_attention(b.q[:1], b.kv_cache, make_batch([1], [5]).common, 1.0)
    assert (out[1] == 0).all()
    assert wanted.shape == (1, 4, 8)
    assert out[0].isfinite().all()
