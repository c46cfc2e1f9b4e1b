"""Latents gathered from their pages; without a GPU the kernel runs interpreted."""

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from attn_ops.metadata import KV_CACHE_DTYPES
from tests.attn_ops.backends.mla.triton.reference import DEVICE

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0], [1]), ([3, 16, 0, 40, 5], [20, 0, 33, 7, 40]), ([0, 0], [0, 0]), ([9] * 9, [5] * 9)],
)
def test_gather(starts, counts, kv_cache_dtype):
    """Starts anywhere in a page; rows behind the last request's stay."""
    from attn_ops.backends.mla.triton.gather import gather_latents

    width, block_size, dtype = 40, 16, torch.float16
    fp8 = KV_CACHE_DTYPES[kv_cache_dtype]
    num_reqs, blocks = len(starts), 4
    table = (torch.randperm(num_reqs * blocks) + 1).int().view(num_reqs, blocks)
    values = torch.randn(num_reqs * blocks + 1, block_size, width + 8).to(fp8 or dtype)[..., :width]
    scale = None if fp8 is None else torch.tensor([0.25], device=DEVICE)
    wanted = torch.full((sum(counts) + 3, width), 7.0, dtype=dtype)
    row = 0
    for request, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for token in range(start, start + count):
            x = values[table[request, token // block_size], token % block_size].float()
            wanted[row] = x if scale is None else x * 0.25
            row += 1
    cu = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    out = torch.full_like(wanted, 7.0, device=DEVICE)
    cache = values if fp8 is None else values.contiguous().view(torch.uint8)
    gather_latents(
        cache.to(DEVICE), table.to(DEVICE), cu,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE), out, kv_scale=scale, fp8=fp8,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=0)
