"""The size of a session's cache on a GPU: what is left of it, and errors that name sizes."""

# pyright: reportOptionalMemberAccess=false
import gc

import pytest
import torch

from attn_ops import AttentionSpec, PagedKVCache
from graphs import DecodeSession
from graphs.cache_size import memory_of
from tests.gpu import graph_cases as cases

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def model(make_model):
    return cases.wide(make_model, "llama")


def test_it_takes_what_is_left_and_no_more(model):
    """So much that a batch at its longest does not fit: the step is measured."""
    in_use, total = memory_of(DEVICE).in_use, memory_of(DEVICE).total
    fraction = (in_use + 3 * 2**30) / total
    session = DecodeSession(
        model, max_batch_size=20_000, max_tokens=2048, max_tokens_per_step=1024,
        capture_sizes=[1, 8], memory_fraction=fraction,
    )  # fmt: skip
    size = session.report().cache
    assert size.why.startswith("what is left of the GPU")
    assert size.num_bytes == session.cache.num_bytes <= size.parts["left"]
    assert size.parts["left"] - size.num_bytes < session.cache.bytes_per_block
    assert size.parts["step"] > 0
    prompts = [[1 + i % 50] * (1 + 37 * i % 400) for i in range(200)]
    assert len(session.generate(prompts, 8)) == 200
    torch.cuda.synchronize()
    in_use = memory_of(DEVICE).in_use
    # CUDA loads kernels when they are launched first: that takes memory which no one measures.
    assert in_use <= total * fraction + 128 * 2**20, "with graphs and all steps"
    print(size, size.parts)


def test_a_small_cache_is_not_measured(model):
    size = DecodeSession(model, max_batch_size=4, max_tokens=256).report().cache
    assert size.num_tokens == 4 * 256
    assert not size.parts


def test_a_cache_that_does_not_fit_names_sizes(model):
    refused(model)  # cuBLAS keeps the workspace of its first product
    gc.collect()  # sessions of other tests
    before = torch.cuda.memory_allocated()
    refused(model)
    assert torch.cuda.memory_allocated() == before


def refused(model):
    for num_tokens in (10**12, 10**10):
        with pytest.raises(ValueError, match=r"^num_tokens .* must fit .* of which .* are free"):
            DecodeSession(model, max_batch_size=4, max_tokens=256, cache_tokens=num_tokens)
    with pytest.raises(ValueError, match=r"^max_tokens must fit into the cache, got 2,048, which"):
        DecodeSession(model, max_batch_size=10**4, max_tokens=2048, memory_fraction=0.001)


def test_free_memory_counts_what_torch_keeps():
    """A cache as large as one that was freed before."""
    spec = AttentionSpec(8, 8, 128, torch.bfloat16)
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        cache = PagedKVCache([spec] * 4, memory_bytes=int(free * 0.6), device=DEVICE)
        assert cache.num_bytes > free * 0.59
        del cache
