"""FLASHINFER against the float64 oracle on a GPU.

FlashInfer compiles a module per dtype, head size, window and cap, and per kind of kernel, so the
options are crossed at one dtype and head size only.
"""

import dataclasses

import pytest
import torch

import fx_passes
from attn_ops import AttentionOptions, AttentionSpec, attention, get_backend
from attn_ops.backends.torch_backend import reference_attention
from graphs import DecodeSession

from .test_backends import RAGGED, check, make
from .test_session import VOCAB, tiny_llama

BACKEND = get_backend("FLASHINFER")
BF16 = torch.bfloat16

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


def with_lse(q, kv_cache, meta, scale, **options):
    """Not through the operator, which refuses it as long as the backend does not declare it."""
    lse = torch.empty(q.shape[:2], device="cuda")
    asked = AttentionOptions(scale, **options, lse=lse)
    return BACKEND.forward(q, kv_cache, meta, asked), lse


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["tensor cores", "CUDA cores"])
def test_against_oracle(batch, options, heads):
    check(*make("FLASHINFER", *BATCHES[batch], *heads, 128, BF16, pad=5, **options))


@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["tensor cores", "CUDA cores"])
def test_float16(batch, heads):
    check(*make("FLASHINFER", *RAGGED[batch], *heads, 128, torch.float16, pad=5))


@pytest.mark.parametrize("head_size", BACKEND.support.head_sizes)
@pytest.mark.parametrize("batch", ["decode", "mixed", "long"])
def test_head_sizes(head_size, batch):
    check(*make("FLASHINFER", *BATCHES[batch], 8, 2, head_size, BF16))


@pytest.mark.parametrize("block_size", BACKEND.support.block_sizes)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (32, 8), (14, 2)])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_block_sizes_and_groups(block_size, heads, batch):
    check(*make("FLASHINFER", *RAGGED[batch], *heads, 128, BF16, block_size=block_size))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"dtype": torch.float32}, "dtype must be supported"),
        ({"head_size": 96}, "head_size must be supported"),
        ({"block_size": 8}, "block_size must be supported"),
        ({"sinks": True}, "sinks must be None"),
        ({"alibi": True}, "alibi_slopes must be None"),
        ({"causal": False}, "causal must be True"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype must be supported"),
    ],
)
def test_what_is_not_declared_is_refused(refused, reason):
    asked = {"head_size": 128, "dtype": BF16, **refused}
    with pytest.raises(ValueError, match=reason):
        make("FLASHINFER", [1], [1], 8, 2, **asked)


def padded(batch, **options):
    """A batch with requests that have query rows and no tokens; returns as `make` does."""
    query, seq = PADDED[batch]
    filled = [max(a, b) for a, b in zip(query, seq, strict=True)]
    q, cache, meta, spec = make("FLASHINFER", query, filled, 8, 2, 128, BF16, pad=3, **options)
    host = torch.tensor(seq, dtype=torch.int32)
    common = meta.common.replace(seq_lens_cpu=host, seq_lens=host.cuda())
    common = common.replace(num_actual_tokens=q.shape[0])
    return q, cache, BACKEND.builder(BACKEND, [spec], 16, "cuda").build(0, common), spec


@pytest.mark.parametrize("batch", PADDED)
def test_padding_requests(batch):
    q, cache, meta, _ = padded(batch)
    q[meta.common.query_start_loc_cpu[-1] :] = float("nan")
    out, lse = with_lse(q, cache, meta, 128**-0.5)
    empty = torch.ones(q.shape[0], dtype=torch.bool)
    starts = meta.common.query_start_loc_cpu.tolist()
    for begin, end, n in zip(starts, starts[1:], meta.common.seq_lens_cpu, strict=False):
        empty[begin:end] = n == 0
    assert (out[empty] == 0).all()
    assert (lse[empty] == -float("inf")).all()
    want = reference_attention(q, cache, meta.common, 128**-0.5)
    torch.testing.assert_close(out[~empty].double(), want[~empty], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", OPTIONS[:4])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["tensor cores", "CUDA cores"])
def test_log_sum_exp(batch, options, heads):
    q, cache, meta, _ = make("FLASHINFER", *BATCHES[batch], *heads, 128, BF16, pad=5, **options)
    out, lse = with_lse(q, cache, meta, 128**-0.5, **options)
    want_lse = torch.empty(q.shape[:2], dtype=torch.float64, device="cuda")
    reference_attention(q, cache, meta.common, 128**-0.5, **options, lse=want_lse)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-3, atol=2e-3)
    assert torch.equal(out, attention(q, cache, meta, 128**-0.5, **options))


def test_scale_is_the_layers_own():
    q, cache, meta, _ = make("FLASHINFER", *RAGGED["mixed"], 8, 2, 128, BF16)
    for scale in (0.02, 0.3):
        out = attention(q, cache, meta, scale)
        want = reference_attention(q, cache, meta.common, scale)
        assert (out.double() - want).norm() / want.norm() < 1.5e-2, scale


@pytest.mark.parametrize("offset", [0, 1])
def test_strided_queries(offset):
    """A slice of a merged product, one whose rows start at multiples of 16 bytes and one not."""
    _, cache, meta, spec = make("FLASHINFER", *RAGGED["mixed"], 8, 2, 128, BF16)
    rows = meta.common.num_actual_tokens
    merged = torch.randn(rows, 12 * 128 + offset, device="cuda", dtype=BF16)
    q = merged[:, offset : offset + 8 * 128].view(rows, 8, 128)
    check(q, cache, meta, spec)


def test_an_empty_batch():
    spec = AttentionSpec(8, 2, 128, BF16)
    _, cache, meta, _ = make("FLASHINFER", [1], [1], 8, 2, 128, BF16)
    meta = BACKEND.builder(BACKEND, [spec], 16, "cuda").build(0, meta.common.unpadded(0, 0))
    out, lse = with_lse(torch.zeros(0, 8, 128, device="cuda", dtype=BF16), cache, meta, 1)
    assert out.shape == (0, 8, 128)
    assert lse.shape == (0, 8)


def test_many_pages_and_requests():
    """Page indices beyond 64 KiB, requests of many lengths."""
    generator = torch.Generator().manual_seed(0)
    seq = torch.randint(1, 3000, (200,), generator=generator).tolist()
    check(*make("FLASHINFER", [1] * 200, seq, 8, 2, 128, BF16))


@pytest.mark.parametrize("batch", ["decode", "mixed", "unordered"])
def test_building_and_running_read_nothing_back(batch):
    """Once the modules are loaded: FlashInfer's own plan copies from the host without waiting."""
    query, seq = BATCHES[batch]
    q, cache, meta, spec = make("FLASHINFER", query, seq, 8, 2, 128, BF16)
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
        q, cache, meta, spec = make("FLASHINFER", [1, 1, 5], seq, 8, 2, 128, BF16)
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
    q, cache, meta, plain = make("FLASHINFER", query, seq, 8, 2, 128, BF16)
    windowed = dataclasses.replace(plain, sliding_window=33)
    meta = BACKEND.builder(BACKEND, [plain, windowed], 16, "cuda").build(0, meta.common)
    for spec in (plain, windowed, plain):
        check(q, cache, meta, spec)


def test_a_session_generates_uncaptured():
    """Requests come and go; the mode is lowered with a reason, tokens nearly equal TRITON's."""
    torch._dynamo.reset()
    fast = torch.compile(tiny_llama(), backend=fx_passes.attn_ops, fullgraph=True)
    generator = torch.Generator().manual_seed(2)
    lengths = (1, 2, 17, 200, 33, 5, 64, 100, 3, 70)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    results = []
    for backend in ("FLASHINFER", "TRITON"):
        session = DecodeSession(
            fast, max_batch_size=4, max_tokens=300, backend=backend, max_tokens_per_step=64
        )
        lowered = "backend FLASHINFER cannot be captured" in session.graph_mode_why
        assert lowered == (backend == "FLASHINFER")
        results.append([r.token_ids for r in session.generate(prompts, 32)])
        assert session.counters.num_recompiles == 0
    same = sum(a == b for a, b in zip(*results, strict=True))
    assert same >= 8, results
