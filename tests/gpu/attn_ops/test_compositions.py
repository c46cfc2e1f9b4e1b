"""Chunked local attention captured, and cascades on a GPU, against what they stand for.

Eager cases are in tests/conformance.
"""

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, get_backend

pytestmark = pytest.mark.gpu

CHUNK, BLOCK, REQUESTS, WIDTH = 64, 16, 8, 32


def by_chunks(q, cache, common, host, scale):
    """Single-token queries: each sees the keys of its own chunk, in float64."""
    want = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    table = common.block_table_tensor.long()
    for request, length in enumerate(host.tolist()):
        if not length:
            continue
        keys = torch.arange((length - 1) // CHUNK * CHUNK, length, device="cuda")
        blocks, offsets = table[request][keys // BLOCK], keys % BLOCK
        k, v = (cache[blocks, i, offsets].double().repeat_interleave(4, 1) for i in (0, 1))
        scores = torch.einsum("nh,cnh->nc", q[request].double(), k) * scale
        want[request] = torch.einsum("nc,cnh->nh", scores.softmax(-1), v)
    return want


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN"])
def test_chunked_local_attention_captured(name):
    """The virtual batches are made in the graph: a replay is right for other lengths."""
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, attention_chunk_size=CHUNK)
    backend = get_backend(name)
    cache = torch.randn(REQUESTS * WIDTH + 1, 2, BLOCK, 8, 128, device="cuda").bfloat16()
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(), query_start_loc_cpu=None,
        seq_lens=torch.ones(REQUESTS, dtype=torch.int32, device="cuda"), num_reqs=REQUESTS,
        num_actual_tokens=REQUESTS, max_query_len=1, max_seq_len=WIDTH * BLOCK,
        block_table_tensor=torch.zeros(REQUESTS, WIDTH, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.zeros(REQUESTS, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    builder = backend.builder(backend, [spec], BLOCK, "cuda")
    q = torch.randn(REQUESTS, 32, 128, device="cuda", dtype=torch.bfloat16)

    def run():
        meta = builder.build_for_cudagraph_capture(common)
        return attention(q, cache, meta, 128**-0.5, attention_chunk_size=CHUNK)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    for _ in range(20):
        q.normal_()
        host = torch.randint(0, WIDTH * BLOCK + 1, (REQUESTS,), dtype=torch.int32)
        host[0] = max(1, int(host[0]))
        common.seq_lens.copy_(host)
        blocks = torch.randperm(REQUESTS * WIDTH) + 1
        common.block_table_tensor.copy_(blocks.view(REQUESTS, WIDTH))
        graph.replay()
        want = by_chunks(q, cache, common, host, 128**-0.5)
        assert (out.double() - want).norm() < 1.5e-2 * want.norm()
        assert (out[host == 0] == 0).all()
