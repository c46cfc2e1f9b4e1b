"""BLOCKSPARSE, and FLEX with a layout, on a GPU: random layers, and replays of captured launches.

`python -m tests.fuzz blocksparse` runs 2,000 cases.
"""

import dataclasses

import pytest
import torch

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention_with_lse, get_backend
from attn_ops.backends.torch_backend import reference_attention
from attn_ops.block_layout import BlocksparseParams, BlockTables, local_strided
from tests.fuzz.blocksparse import check, draw

pytestmark = pytest.mark.gpu

PARAMS = BlocksparseParams(2048, 32, 8, 64, 4, 8)


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_layers(first):
    for seed in range(first, first + 50):
        check(draw(seed, "cuda", 1000), "BLOCKSPARSE", "cuda")


def test_random_layers_of_flex():
    """Few: each geometry is compiled."""
    for seed in range(6):
        case = dataclasses.replace(draw(seed, "cuda", 600), head_size=64, features=())
        check(case, "FLEX", "cuda")


def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(attention_with_lse, fullgraph=True, dynamic=True)
    for seed in range(5, 9):
        check(draw(seed, "cuda", 500), "BLOCKSPARSE", "cuda", compiled)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_500_random_steps_replayed(max_query_len, kv_cache_dtype):
    """One captured launch for lengths that change on the device, 0 and blocks' ends among them."""
    backend, num_reqs, width = get_backend("BLOCKSPARSE"), 8, 2048 // 64
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, blocksparse=64, kv_cache_dtype=kv_cache_dtype)
    table = torch.arange(1, 1 + num_reqs * width, dtype=torch.int32).view(num_reqs, width)
    cache = torch.randn(1 + num_reqs * width, 2, 64, 8, 128, device="cuda", dtype=spec.dtype)
    if kv_cache_dtype != "auto":
        cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
    common = CommonAttentionMetadata.from_lengths(
        [max_query_len] * num_reqs, [2048] * num_reqs, table, 64, "cuda"
    )
    bound = common.replace(
        seq_lens_cpu=None, query_start_loc_cpu=None, num_computed_tokens_cpu=None
    )
    q = torch.randn(num_reqs * max_query_len, 32, 128, device="cuda", dtype=spec.dtype)
    tables = BlockTables(local_strided(PARAMS)).cuda()
    meta = backend.builder(backend, [spec], 64, "cuda").build_for_cudagraph_capture(bound)
    asked = {"blocksparse": tables, "kv_cache_dtype": kv_cache_dtype}

    def run():
        return attention_with_lse(q, cache, meta, 0.1, **asked)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    generator = torch.Generator().manual_seed(0)
    for step in range(500):
        lengths = torch.randint(max_query_len, 2049, (num_reqs,), generator=generator)
        lengths[step % num_reqs] = [max_query_len, 64, 65, 2048, 1024][step % 5]
        if step % 7 == 0:
            lengths[3] = 0  # padding of a captured batch
        common.seq_lens.copy_(lengths)
        q.normal_()
        graph.replay()
        called = run()
        assert torch.equal(out, called[0])
        assert torch.equal(lse, called[1])
        if step % 50 == 0:
            want_lse = torch.empty_like(lse)
            now = common.replace(seq_lens_cpu=lengths.int())
            want = reference_attention(q, cache, now, 0.1, lse=want_lse, **asked)
            assert (out.double() - want).norm() <= 2e-2 * want.norm()
            torch.testing.assert_close(lse, want_lse, rtol=1e-2, atol=2e-2)
