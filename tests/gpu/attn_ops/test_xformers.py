"""XFORMERS against the float64 oracle on a GPU: what goes to xFormers, to Triton, and to both."""

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention_with_lse
from attn_ops.backends import registry, xformers_backend
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.backends.xformers_backend import BACKEND

pytestmark = pytest.mark.gpu

RAGGED = {
    "decode": ([1] * 6, [1, 2, 16, 17, 300, 1000]),
    "mixed": ([1, 1, 0, 7, 130, 1], [5, 400, 0, 7, 300, 1]),
    "prefill": ([1, 64, 513], [1, 64, 513]),
    "uniform": ([4, 4, 4], [4, 100, 35]),
    "drafts": ([9] * 4, [9, 10, 200, 3000]),
}
BY_XFORMERS = {"decode": 6, "mixed": 2, "prefill": 1, "uniform": 12, "drafts": 36}
"""Query rows that the operator computes."""

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def library():
    missing = BACKEND.unavailable()
    if missing:
        pytest.skip(missing)


@pytest.fixture
def operator_rows(monkeypatch):
    """Query rows of every call of xFormers."""
    rows, by_xformers = [], xformers_backend._by_xformers

    def record(q, *arguments):
        rows.append(q.shape[0])
        return by_xformers(q, *arguments)

    monkeypatch.setattr(xformers_backend, "_by_xformers", record)
    return rows


def make(
    query, seq, heads=(8, 2), head_size=128, dtype=torch.bfloat16, block_size=16, layout="NHD",
    causal=True, **options,
):  # fmt: skip
    """(q, cache, metadata, options): NaN outside of the valid tokens, and in the padding rows."""
    width = max(1, -(-max(seq) // block_size))
    num_blocks = len(seq) * width + 1
    table = (torch.randperm(num_blocks - 1)[: len(seq) * width] + 1).view(len(seq), width).int()
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for blocks, length in zip(table.long(), seq, strict=True):
        for first in range(0, length, block_size):
            written[blocks[first // block_size], : length - first] = True
    cache = torch.randn(num_blocks, 2, block_size, heads[1], head_size)
    cache = cache.masked_fill(~written[:, None, :, None, None], float("nan")).to(dtype).cuda()
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    common = CommonAttentionMetadata.from_lengths(
        query, seq, table, block_size, "cuda", num_padded_tokens=sum(query) + 3
    )
    common.causal = causal
    q = torch.randn(sum(query) + 3, heads[0], head_size, device="cuda", dtype=dtype)
    q[sum(query) :] = float("nan")
    spec = AttentionSpec(heads[0], heads[1], head_size, dtype, causal=causal, **options)
    return q, cache, BACKEND.builder(BACKEND, [spec], block_size, "cuda").build(0, common), options


def check(q, cache, meta, options):
    scale = q.shape[2] ** -0.5
    out, lse = attention_with_lse(q, cache, meta, scale, **options)
    want_lse = torch.empty(q.shape[:2], device="cuda")
    want = reference_attention(q, cache, meta.common, scale, lse=want_lse, **options)
    assert out.isfinite().all()
    error = float((out.double() - want).norm() / want.norm())
    assert error < TOLERANCE[q.dtype], f"relative error {error:.2e}"
    assert (out[meta.common.num_actual_tokens :] == 0).all()
    assert torch.allclose(lse, want_lse, rtol=0, atol=3 * TOLERANCE[q.dtype])


@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_against_oracle(operator_rows, batch, dtype, layout):
    check(*make(*RAGGED[batch], dtype=dtype, layout=layout))
    assert operator_rows == [BY_XFORMERS[batch]]


@pytest.mark.parametrize("options", [{"sliding_window": 33}, {"soft_cap": 20.0}])
@pytest.mark.parametrize("batch", RAGGED)
def test_layers_for_triton_alone(operator_rows, batch, options):
    check(*make(*RAGGED[batch], **options))
    assert not operator_rows


@pytest.mark.parametrize("head_size", [32, 40, 64, 72, 80, 104, 128, 136, 192, 200, 248, 256])
def test_head_sizes(operator_rows, head_size):
    for batch in ("decode", "mixed", "uniform"):
        check(*make(*RAGGED[batch], head_size=head_size))
    assert bool(operator_rows) == (head_size in xformers_backend.HEAD_SIZES)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (32, 8)])
def test_block_sizes_and_groups(block_size, heads):
    for batch in ("decode", "mixed", "uniform"):
        check(*make(*RAGGED[batch], heads, block_size=block_size))


def test_non_causal(operator_rows):
    check(*make(*RAGGED["decode"], causal=False))
    check(*make(*RAGGED["uniform"], causal=False))
    assert operator_rows == [6]


def test_nothing_is_read_from_the_device():
    q, cache, meta, _ = make(*RAGGED["mixed"])
    attention_with_lse(q, cache, meta, 128**-0.5)
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = BACKEND.builder(BACKEND, [spec], 16, "cuda").build(0, meta.common)
        attention_with_lse(q, cache, made, 128**-0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_and_replayed():
    """A decode batch with changed lengths, tables and padding requests, without mirrors."""
    spec = AttentionSpec(32, 8, 128, torch.bfloat16)
    cache = torch.randn(513, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(8, 64, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(8, dtype=torch.int32, device="cuda")
    common = CommonAttentionMetadata(
        query_start_loc=torch.arange(9, dtype=torch.int32, device="cuda"),
        query_start_loc_cpu=None, seq_lens=seq_lens, num_reqs=8, num_actual_tokens=8,
        max_query_len=1, max_seq_len=1024, block_table_tensor=table,
        slot_mapping=torch.zeros(8, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    builder = BACKEND.builder(BACKEND, [spec], 16, "cuda")
    q = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)

    def run():
        metadata = builder.build_for_cudagraph_capture(common)
        return attention_with_lse(q, cache, metadata, 128**-0.5)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = run()
    for step in range(20):
        q.normal_()
        lengths = torch.randint(1, 1025, (8,)).int()
        lengths[8 - step % 5 :] = 0
        seq_lens.copy_(lengths)
        table.copy_((torch.randperm(512) + 1).view(8, 64))
        graph.replay()
        want_lse = torch.empty_like(lse)
        want = reference_attention(q, cache, common, 128**-0.5, lse=want_lse)
        assert (out.double() - want).norm() / want.norm() < 1.5e-2
        assert (out[lengths == 0] == 0).all()
        assert torch.allclose(lse, want_lse, rtol=0, atol=4.5e-2)


def test_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {"XFORMERS": "attn_ops.backends.xformers_backend"})
    spec = AttentionSpec(8, 2, 128, torch.bfloat16)
    selection = registry.select_backend(spec, block_size=16, device="cuda", backend="XFORMERS")
    assert selection.backend is BACKEND
