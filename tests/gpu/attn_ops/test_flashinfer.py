"""FLASHINFER against the float64 oracle on a GPU.

FlashInfer compiles a module per dtype, head size, window and cap, and per kind of kernel, so the
options are crossed at one dtype and head size only. `tests/conformance -k FLASHINFER` has float16
and the other head sizes. Captured steps: test_flashinfer_captured.py.
"""

import dataclasses

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_with_lse, get_backend
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.gpu.attn_ops.test_backends import RAGGED, check, make

BACKEND = get_backend("FLASHINFER")
BF16 = torch.bfloat16
SIZE = 64
SCALE = SIZE**-0.5

pytestmark = pytest.mark.gpu

BATCHES = {
    **RAGGED,
    "long": ([1, 1, 700], [9000, 4097, 3000]),
    "unordered": ([7, 1, 130, 1], [7, 300, 300, 17]),
    "no query among decodes": ([1, 0, 1, 3], [40, 33, 300, 9]),
}
PADDED = {
    "behind": ([1, 1, 1, 1], [5, 300, 0, 0]),
    "between": ([1, 1, 1, 20], [5, 0, 300, 40]),
    "a prefill in front": ([20, 1, 30], [0, 9, 40]),
    "alone": ([1, 1], [0, 0]),
}
OPTIONS = [
    {},
    {"sliding_window": 33},
    {"soft_cap": 20.0},
    {"sliding_window": 16, "soft_cap": 5.0},
    {"sliding_window": 1},
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["grouped", "each its own"])
def test_against_oracle(batch, options, heads):
    check(*make("FLASHINFER", *BATCHES[batch], *heads, SIZE, BF16, pad=5, **options))


@pytest.mark.parametrize("head_size", [128, 256])
@pytest.mark.parametrize("batch", ["mixed", "long"])
def test_head_sizes(head_size, batch):
    check(*make("FLASHINFER", *BATCHES[batch], 8, 2, head_size, torch.float16))


@pytest.mark.parametrize("block_size", BACKEND.support.block_sizes)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (32, 8), (14, 2)])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_block_sizes_and_groups(block_size, heads, batch):
    check(*make("FLASHINFER", *RAGGED[batch], *heads, SIZE, BF16, block_size=block_size))


def compare(q, cache, meta, spec, **options):
    """Output and log-sum-exp; `options` beside those of the geometry."""
    options |= {"sliding_window": spec.sliding_window, "soft_cap": spec.soft_cap}
    scale = spec.head_size**-0.5
    out, lse = attention_with_lse(q, cache, meta, scale, **options)
    want_lse = torch.empty(q.shape[:2], dtype=torch.float64, device="cuda")
    want = reference_attention(q, cache, meta.common, scale, lse=want_lse, **options)
    assert out.isfinite().all()
    error = (out.double() - want).norm() / want.norm()
    assert error < 1.5e-2, f"relative error {error:.2e}"
    torch.testing.assert_close(lse.double(), want_lse, rtol=5e-3, atol=5e-3)
    assert (out[meta.common.num_actual_tokens :] == 0).all()
    assert torch.equal(out, attention(q, cache, meta, scale, **options))


def fp8_case(dtype, batch, head_size=SIZE):
    """As `make`, over an FP8 cache, and the options of its layers."""
    case = make("FLASHINFER", *BATCHES[batch], 8, 2, head_size, BF16, pad=3, kv_cache_dtype=dtype)
    q, cache, meta, spec = case
    scales = (torch.tensor([scale], device="cuda") for scale in (0.37, 1.7))
    options = dict(zip(("k_scale", "v_scale"), scales, strict=True), kv_cache_dtype=dtype)
    return q, cache.to(KV_CACHE_DTYPES[dtype]).view(torch.uint8), meta, spec, options


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("batch", BATCHES)
def test_fp8_caches(dtype, batch):
    *case, options = fp8_case(dtype, batch)
    compare(*case, **options)
    del options["k_scale"], options["v_scale"]
    compare(*case, **options)


@pytest.mark.parametrize("batch", ["decode", "mixed", "long"])
def test_fp8_at_head_size_128(batch):
    *case, options = fp8_case("fp8_e4m3", batch, 128)
    compare(*case, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0}])
def test_non_causal(batch, options):
    """An encoder's keys, a prefix that all rows see."""
    q, cache, meta, spec = make("FLASHINFER", *BATCHES[batch], 8, 2, SIZE, BF16, pad=5, **options)
    common = meta.common.replace(causal=False)
    for causal in (True, False):
        asked = dataclasses.replace(spec, causal=causal)
        compare(q, cache, BACKEND.builder(BACKEND, [asked], 16, "cuda").build(0, common), spec)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("batch", ["decode", "mixed", "long"])
def test_heads_before_tokens(dtype, block_size, batch):
    """HND: the kernels take the strides of pages, tokens and heads as they are, FA2 and FA3."""
    q, cache, meta, spec = make(
        "FLASHINFER", *BATCHES[batch], 8, 2, SIZE, BF16, block_size=block_size, kv_cache_dtype=dtype
    )
    if dtype != "auto":
        cache = cache.to(KV_CACHE_DTYPES[dtype]).view(torch.uint8)
    cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    assert cache.stride(3) > cache.stride(2)
    compare(q, cache, meta, spec, kv_cache_dtype=dtype)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"dtype": torch.float32}, "dtype must be supported"),
        ({"head_size": 96}, "head_size must be supported"),
        ({"block_size": 8}, "block_size must be supported"),
        ({"sinks": True}, "sinks must be None"),
        ({"alibi": True}, "alibi_slopes must be None"),
        ({"causal": False, "sliding_window": 9}, "sliding_window must be None without causal"),
    ],
)
def test_what_is_not_declared_is_refused(refused, reason):
    asked = {"head_size": SIZE, "dtype": BF16, **refused}
    with pytest.raises(ValueError, match=reason):
        make("FLASHINFER", [1], [1], 8, 2, **asked)


def padded(batch, **options):
    """A batch with requests that have query rows and no tokens; returns as `make` does."""
    query, seq = PADDED[batch]
    filled = [max(a, b) for a, b in zip(query, seq, strict=True)]
    q, cache, meta, spec = make("FLASHINFER", query, filled, 8, 2, SIZE, BF16, pad=3, **options)
    host = torch.tensor(seq, dtype=torch.int32)
    common = meta.common.replace(seq_lens_cpu=host, seq_lens=host.cuda())
    common = common.replace(num_actual_tokens=q.shape[0])
    return q, cache, BACKEND.builder(BACKEND, [spec], 16, "cuda").build(0, common), spec


@pytest.mark.parametrize("batch", PADDED)
def test_padding_requests(batch):
    q, cache, meta, _ = padded(batch)
    q[meta.common.query_start_loc_cpu[-1] :] = float("nan")
    out, lse = attention_with_lse(q, cache, meta, SCALE)
    empty = torch.ones(q.shape[0], dtype=torch.bool)
    starts = meta.common.query_start_loc_cpu.tolist()
    for begin, end, n in zip(starts, starts[1:], meta.common.seq_lens_cpu, strict=False):
        empty[begin:end] = n == 0
    assert (out[empty] == 0).all()
    assert (lse[empty] == -float("inf")).all()
    want = reference_attention(q, cache, meta.common, SCALE)
    torch.testing.assert_close(out[~empty].double(), want[~empty], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", OPTIONS[:4])
def test_log_sum_exp(batch, options):
    compare(*make("FLASHINFER", *BATCHES[batch], 8, 2, SIZE, BF16, pad=5, **options))


def test_scale_is_the_layers_own():
    q, cache, meta, _ = make("FLASHINFER", *RAGGED["mixed"], 8, 2, SIZE, BF16)
    for scale in (0.02, 0.3):
        out = attention(q, cache, meta, scale)
        want = reference_attention(q, cache, meta.common, scale)
        assert (out.double() - want).norm() / want.norm() < 1.5e-2, scale


@pytest.mark.parametrize("offset", [0, 1])
def test_strided_queries(offset):
    """A slice of a merged product, one whose rows start at multiples of 16 bytes and one not."""
    _, cache, meta, spec = make("FLASHINFER", *RAGGED["mixed"], 8, 2, SIZE, BF16)
    rows = meta.common.num_actual_tokens
    merged = torch.randn(rows, 12 * SIZE + offset, device="cuda", dtype=BF16)
    q = merged[:, offset : offset + 8 * SIZE].view(rows, 8, SIZE)
    check(q, cache, meta, spec)


def test_an_empty_batch():
    spec = AttentionSpec(8, 2, SIZE, BF16)
    _, cache, meta, _ = make("FLASHINFER", [1], [1], 8, 2, SIZE, BF16)
    meta = BACKEND.builder(BACKEND, [spec], 16, "cuda").build(0, meta.common.unpadded(0, 0))
    out, lse = attention_with_lse(
        torch.zeros(0, 8, SIZE, device="cuda", dtype=BF16), cache, meta, 1
    )
    assert out.shape == (0, 8, SIZE)
    assert lse.shape == (0, 8)


def test_many_pages_and_requests():
    """Page indices beyond 64 KiB, requests of many lengths."""
    generator = torch.Generator().manual_seed(0)
    seq = torch.randint(1, 3000, (200,), generator=generator).tolist()
    check(*make("FLASHINFER", [1] * 200, seq, 8, 2, SIZE, BF16))


@pytest.mark.parametrize("batch", ["decode", "mixed", "unordered"])
def test_building_and_running_read_nothing_back(batch):
    """Once the modules are loaded: FlashInfer's own plan copies from the host without waiting."""
    query, seq = BATCHES[batch]
    q, cache, meta, spec = make("FLASHINFER", query, seq, 8, 2, SIZE, BF16)
    builder = BACKEND.builder(BACKEND, [spec], 16, "cuda")
    attention(q, cache, builder.build(0, meta.common), 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, cache, builder.build(0, meta.common), 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_built_ahead_of_the_device():
    """The host plans 40 steps while the device is busy; each runs with its own batch's plan."""
    cases = []
    builder = None
    for step in range(40):
        seq = [1 + 37 * step, 1500 - 31 * step, 5 + step]
        q, cache, meta, spec = make("FLASHINFER", [1, 1, 5], seq, 8, 2, SIZE, BF16)
        builder = builder or BACKEND.builder(BACKEND, [spec], 16, "cuda")
        cases.append((q, cache, meta.common))
    attention(*cases[0][:2], builder.build(0, cases[0][2]), 0.1)
    torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    for _ in range(20):
        busy = (busy @ busy).clamp(-1, 1)
    outs = [attention(q, cache, builder.build(0, common), 0.1) for q, cache, common in cases]
    for (q, cache, common), out in zip(cases, outs, strict=True):
        want = reference_attention(q, cache, common, 0.1)
        assert (out.double() - want).norm() / want.norm() < 1.5e-2


def test_geometries_of_one_batch_share_a_builder():
    """Gemma 2: every other layer has a window."""
    query, seq = BATCHES["mixed"]
    q, cache, meta, plain = make("FLASHINFER", query, seq, 8, 2, SIZE, BF16)
    windowed = dataclasses.replace(plain, sliding_window=33)
    meta = BACKEND.builder(BACKEND, [plain, windowed], 16, "cuda").build(0, meta.common)
    for spec in (plain, windowed, plain):
        check(q, cache, meta, spec)
