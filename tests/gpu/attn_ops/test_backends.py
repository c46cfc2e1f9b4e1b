"""TRITON and FLASH_ATTN against the float64 oracle on a GPU."""

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, get_backend
from attn_ops.backends.torch_backend import reference_attention

pytestmark = pytest.mark.gpu

RAGGED = {
    "decode": ([1] * 6, [1, 2, 16, 17, 300, 1000]),
    "mixed": ([1, 1, 0, 7, 130, 1], [5, 400, 0, 7, 300, 1]),
    "prefill": ([1, 64, 513], [1, 64, 513]),
    "uniform": ([4, 4, 4], [4, 100, 35]),
}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 1e-5}


def make(name, query, seq, heads, kv_heads, head_size, dtype, block_size=16, pad=0, **spec_options):
    """Poisoned cache, shuffled blocks; returns q, cache, metadata, spec."""
    spec = AttentionSpec(heads, kv_heads, head_size, dtype, **spec_options)
    per = max(1, -(-max(seq) // block_size))
    blocks = len(seq) * per + 1
    cache = torch.full(
        (blocks, 2, block_size, kv_heads, head_size), float("nan"), dtype=dtype, device="cuda"
    )
    table = (torch.randperm(blocks - 1)[: len(seq) * per] + 1).view(len(seq), per).int()
    for r, n in enumerate(seq):
        for b in range(-(-n // block_size)):
            m = min(block_size, n - b * block_size)
            cache[table[r, b], :, :m] = torch.randn(
                2, m, kv_heads, head_size, device="cuda", dtype=dtype
            )
    common = CommonAttentionMetadata.from_lengths(
        query, seq, table, block_size, "cuda", num_padded_tokens=sum(query) + pad
    )
    q = torch.randn(sum(query) + pad, heads, head_size, device="cuda", dtype=dtype)
    backend = get_backend(name)
    meta = backend.builder(backend, [spec], block_size, "cuda").build(0, common)
    return q, cache, meta, spec


def check(q, cache, meta, spec):
    scale = spec.head_size**-0.5
    out = attention(
        q, cache, meta, scale, sliding_window=spec.sliding_window, soft_cap=spec.soft_cap
    )
    want = reference_attention(
        q, cache, meta.common, scale, spec.sliding_window, spec.soft_cap, torch.float64
    )
    assert out.isfinite().all()
    error = (out.double() - want).norm() / want.norm()
    assert error < TOLERANCE[q.dtype], f"relative error {error:.2e}"
    rows = meta.common.num_actual_tokens
    assert (out[rows:] == 0).all()


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN"])
@pytest.mark.parametrize("batch", RAGGED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 33}, {"soft_cap": 20.0}, {"sliding_window": 16, "soft_cap": 5.0}],
)
def test_against_oracle(name, batch, dtype, options):
    if dtype not in get_backend(name).support.dtypes:
        with pytest.raises(ValueError, match="dtype must be supported"):
            make(name, *RAGGED[batch], 8, 2, 128, dtype, pad=5, **options)
        return
    check(*make(name, *RAGGED[batch], 8, 2, 128, dtype, pad=5, **options))


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN"])
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_head_sizes(name, head_size, batch):
    if head_size not in get_backend(name).support.head_sizes:
        with pytest.raises(ValueError, match="head_size must be supported"):
            make(name, *RAGGED[batch], 8, 4, head_size, torch.bfloat16)
        return
    check(*make(name, *RAGGED[batch], 8, 4, head_size, torch.bfloat16))


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (32, 8)])
def test_block_sizes_and_groups(name, block_size, heads):
    if block_size not in get_backend(name).support.block_sizes:
        with pytest.raises(ValueError, match="block_size must be supported"):
            make(name, [1], [1], *heads, 128, torch.bfloat16, block_size=block_size)
        return
    for batch in ("decode", "mixed"):
        check(*make(name, *RAGGED[batch], *heads, 128, torch.bfloat16, block_size=block_size))


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN"])
def test_padding_requests_and_replay_with_other_lengths(name):
    """A captured decode batch, replayed with changed lengths, tables and padding requests."""
    spec = AttentionSpec(32, 8, 128, torch.bfloat16)
    backend = get_backend(name)
    cache = torch.randn(513, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(8, 64, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(8, dtype=torch.int32, device="cuda")
    starts = torch.arange(9, dtype=torch.int32)
    host = torch.zeros(8, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(), query_start_loc_cpu=starts, seq_lens=seq_lens,
        seq_lens_cpu=host, num_computed_tokens_cpu=host, num_reqs=8, num_actual_tokens=8,
        max_query_len=1, max_seq_len=1024, block_table_tensor=table,
        slot_mapping=torch.zeros(8, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    builder = backend.builder(backend, [spec], 16, "cuda")
    q = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)

    def run():
        return attention(q, cache, builder.build_for_cudagraph_capture(common), 128**-0.5)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    for _ in range(20):
        q.normal_()
        host.copy_(torch.randint(0, 1025, (8,)).int())
        host[int(torch.randint(0, 8, ())) :] = 0
        host[0] = max(1, int(host[0]))
        seq_lens.copy_(host)
        table.copy_((torch.randperm(512)[:512] + 1).view(8, 64))
        graph.replay()
        want = reference_attention(q, cache, common, 128**-0.5)
        assert ((out.double() - want).norm() / want.norm()) < 1.5e-2
        assert (out[host == 0] == 0).all()
