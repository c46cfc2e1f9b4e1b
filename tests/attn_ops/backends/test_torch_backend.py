"""TORCH against a loop over tokens and heads in float64, written down here independently of it."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_ops import AttentionSpec, attention, attention_with_lse, write_kv
from attn_ops.backends.torch_backend import reference_attention
from tests.kit.batches import build_metadata, random_batch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def brute_force(
    b,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: list[float] | None = None,
    sinks: list[float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, N, H] and log-sum-exp [T, N], float64: a row, a head and a key at a time."""
    common, block_size = b.common, b.kv_cache.shape[2]
    num_heads, num_kv_heads = b.q.shape[1], b.kv_cache.shape[3]
    out_TNH = torch.zeros(b.q.shape, dtype=torch.float64)
    lse_TN = torch.full(b.q.shape[:2], -math.inf, dtype=torch.float64)
    row = 0
    for request, num_cached in enumerate(common.seq_lens.tolist()):
        num_queries = int(common.query_start_loc[request + 1]) - row
        for query in range(num_queries):
            position = num_cached - num_queries + query
            for head in range(num_heads):
                scores, values = [], []
                for key in range(num_cached):
                    distance = position - key
                    if (common.causal and distance < 0) or (
                        sliding_window and abs(distance) >= sliding_window
                    ):
                        continue
                    block = int(common.block_table_tensor[request, key // block_size])
                    k_H, v_H = b.kv_cache[
                        block, :, key % block_size, head // (num_heads // num_kv_heads)
                    ].double()
                    score = scale * float(b.q[row, head].double() @ k_H)
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    if alibi_slopes is not None:
                        score -= alibi_slopes[head] * abs(distance)
                    scores.append(score)
                    values.append(v_H)
                logits = scores if sinks is None else [*scores, sinks[head]]
                weights = [math.exp(s - max(logits)) for s in logits]
                mixed = sum(w * v for w, v in zip(weights, values, strict=False))
                out_TNH[row, head] = mixed / sum(weights)
                lse_TN[row, head] = max(logits) + math.log(sum(weights))
            row += 1
    return out_TNH, lse_TN


@functools.cache
def compiled_attention():
    """One compiled function for all examples. dynamic=True: a new batch is a new shape only."""
    return torch.compile(attention_with_lse, backend="aot_eager", fullgraph=True, dynamic=True)


CASES = {
    "lengths": st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=4),
    "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)]),
    "head_size": st.sampled_from([1, 3, 8]),
    "block_size": st.sampled_from([1, 3, 4, 16]),
    "sliding_window": st.sampled_from([None, None, 1, 2, 5, 100]),
    "soft_cap": st.sampled_from([None, 0.5, 30.0]),
    "causal": st.sampled_from([True, True, False]),
    "alibi": st.booleans(),
    "with_sinks": st.booleans(),
    "dtype": st.sampled_from(list(TOLERANCE)),
    "num_padding_rows": st.integers(0, 3),
    "seed": st.integers(0, 1000),
}


@pytest.mark.parametrize(
    ("compiled", "num_cases"),
    [(False, 100), (True, 10), pytest.param(True, 25, marks=pytest.mark.slow)],
)
def test_against_brute_force(make_batch, compiled, num_cases):
    @settings(max_examples=num_cases, suppress_health_check=[HealthCheck.too_slow])
    @given(st.fixed_dictionaries(CASES))
    def check(case):
        lengths, (num_heads, num_kv_heads) = case.pop("lengths"), case.pop("heads")
        alibi, with_sinks = case.pop("alibi"), case.pop("with_sinks")
        options = {name: case.pop(name) for name in ("sliding_window", "soft_cap")}
        dtype, scale = case["dtype"], case["head_size"] ** -0.5
        b = make_batch(
            [q for q, _ in lengths],
            [q + computed for q, computed in lengths],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            **case,
        )
        vectors = {
            "alibi_slopes": torch.rand(num_heads) if alibi else None,
            "sinks": torch.randn(num_heads) * 3 if with_sinks else None,
        }
        lists = {name: None if v is None else v.tolist() for name, v in vectors.items()}
        wanted, wanted_lse = brute_force(b, scale, **options, **lists)
        lse = torch.empty(b.q.shape[:2])
        oracle = reference_attention(
            b.q, b.kv_cache, b.common, scale, **options, **vectors, lse=lse
        )
        torch.testing.assert_close(oracle, wanted, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)
        attend = compiled_attention() if compiled else attention_with_lse
        if compiled:
            torch._dynamo.reset()  # each geometry is a new graph; Dynamo gives up after eight
        out, lse = attend(b.q, b.kv_cache, b.meta, scale, **options, **vectors)
        assert out.dtype == dtype
        close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out.double(), wanted, **close)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)

    check()


def test_large_scores_do_not_overflow(make_batch):
    b = make_batch([2, 1], [9, 4])
    b.q *= 1e4
    wanted, _ = brute_force(b, 1.0)
    out = attention(b.q, b.kv_cache, b.meta, 1.0)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)


def test_padding_requests_of_a_captured_batch_are_zero(make_batch):
    """A query row whose request has nothing in the cache: seq_len 0."""
    b = make_batch([1, 1], [5, 1])
    wanted, _ = brute_force(b, 1.0)
    seq_lens = torch.tensor([5, 0], dtype=torch.int32)
    b.meta.common = dataclasses.replace(b.common, seq_lens=seq_lens, seq_lens_cpu=seq_lens)
    out = attention(b.q, b.kv_cache, b.meta, 1.0)
    torch.testing.assert_close(out[0].double(), wanted[0], atol=1e-5, rtol=1e-5)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [None, (0.5, 2.0)])
def test_fp8_cache(make_batch, kv_cache_dtype, scales):
    """What is written comes back rounded to FP8, in units of the scale; large values saturate."""
    b = make_batch([3, 1], [5, 4], written=False)
    fp8 = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[kv_cache_dtype])
    cache = torch.zeros(b.kv_cache.shape, dtype=torch.uint8)
    options = {"kv_cache_dtype": kv_cache_dtype}
    factors = scales or (1.0, 1.0)
    if scales:
        options |= {"k_scale": torch.tensor(scales[:1]), "v_scale": torch.tensor(scales[1:])}
    spec = AttentionSpec(4, 2, 8, torch.float32, kv_cache_dtype=kv_cache_dtype)
    backend = b.meta.backend
    meta = backend.builder(backend, [spec], 4, "cpu").build(0, b.common)
    b.k[0] = 1e6
    write_kv(b.k, b.v, cache, meta, **options)
    meant = torch.zeros(cache.shape)
    limit = torch.finfo(fp8).max
    for row, slot in enumerate(b.common.slot_mapping.tolist()):
        for index, (x, factor) in enumerate(zip((b.k, b.v), factors, strict=True)):
            rounded = (x[row] / factor).clamp(-limit, limit).to(fp8).float() * factor
            meant[slot // 4, index, slot % 4] = rounded
    assert torch.isfinite(meant).all()
    read = cache.view(fp8).float() * torch.tensor(factors).view(1, 2, 1, 1, 1)
    torch.testing.assert_close(read[1:], meant[1:], atol=0, rtol=0)
    got = attention(b.q, cache, meta, 0.3, **options)
    b.kv_cache = meant
    wanted, _ = brute_force(b, 0.3)
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


def test_torch_rows_that_see_no_key_are_zero():
    """A non-causal request whose keys are not its rows, as in cross-attention."""
    q, cache, common = random_batch((12,), (48,))
    keys = torch.tensor([4], dtype=torch.int32)
    common = common.replace(
        seq_lens=keys, seq_lens_cpu=keys, num_computed_tokens_cpu=None, causal=False
    )
    spec = AttentionSpec(4, 2, 32, torch.float32, sliding_window=3, causal=False)
    meta = build_metadata("TORCH", common, spec)
    out, lse = attention_with_lse(q, cache, meta, 0.2, sliding_window=3)
    assert not out[0].any()
    assert (lse[0] == float("-inf")).all()


def test_cascade_leaves_padding_rows_zero():
    """Rows behind query_start_loc[-1] that num_actual_tokens counts; `validate` allows them."""
    q, cache, common = random_batch((1, 1), (40, 40))
    common.block_table_tensor[1, 0] = common.block_table_tensor[0, 0]
    slots = torch.cat([common.slot_mapping, torch.full((2,), -1)])
    common = common.replace(num_actual_tokens=4, slot_mapping=slots, positions=None)
    common.validate(block_size=16)
    q = torch.cat([q, torch.randn(2, 4, 32)])
    assert not attention(q, cache, build_metadata("TORCH", common), 0.2)[2:].any()
    shared = build_metadata("TORCH", common, common_prefix_len=16)
    assert not attention(q, cache, shared, 0.2)[2:].any()
