"""Latents written to their slots by one kernel; without a GPU it runs interpreted."""

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from attn_ops.metadata import KV_CACHE_DTYPES
from attn_ops.ops.write_kv import stored
from tests.attn_ops.backends.mla.triton.reference import DEVICE

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")

SLOTS = [17, -1, 3, 90, -1, 16]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_write(dtype, kv_cache_dtype, scaled):
    """Parts of wider tensors, a page of 12 tokens; saturated, infinite and NaN among the values."""
    from attn_ops.backends.mla.triton.write import write_latents

    fp8 = KV_CACHE_DTYPES[kv_cache_dtype]
    x = torch.randn(len(SLOTS), 70, device=DEVICE).to(dtype)
    x[0, :5] = torch.tensor([6e4, -6e4, torch.inf, -torch.inf, torch.nan])
    kv_c, k_pe = x[:, :40], x[:, 43:63]
    scale = torch.tensor([0.3], device=DEVICE) if scaled else None
    held = torch.uint8 if fp8 else dtype
    cache = torch.randint(0, 100, (9, 12, 64), device=DEVICE).to(held)[..., :60]
    before = cache.clone()
    slots = torch.tensor(SLOTS, device=DEVICE)
    write_latents(kv_c, k_pe, cache, slots, fp8, scale)
    wanted = stored(torch.cat([kv_c, k_pe], 1), kv_cache_dtype, scale)
    rows = {slot: row for row, slot in enumerate(SLOTS) if slot >= 0}
    for slot in range(1, 9 * 12):
        got = cache[slot // 12, slot % 12]
        if slot in rows:
            check_row(got, wanted[rows[slot]], fp8)
        else:
            assert torch.equal(got, before[slot // 12, slot % 12]), slot


def check_row(got, wanted, fp8) -> None:
    """Equal; interpreted, a value of FP8 is rounded down where it is carried, and NaN is any."""
    if fp8 is None or DEVICE.type == "cuda":
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        return
    got, wanted = got.view(fp8).float(), wanted.view(fp8).float()
    known = ~wanted.isnan()
    torch.testing.assert_close(got[known], wanted[known], rtol=0.51, atol=2**-9)


def test_no_rows():
    from attn_ops.backends.mla.triton.write import write_latents

    cache = torch.ones(2, 4, 6, device=DEVICE)
    none = torch.empty(0, 6, device=DEVICE)
    write_latents(none[:, :4], none[:, 4:], cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert (cache == 1).all()
