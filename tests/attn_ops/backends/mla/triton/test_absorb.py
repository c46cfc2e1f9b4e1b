"""q through W_UK against float64; without a GPU the kernel runs interpreted."""

import pytest
import torch

from attn_ops.backends.triton import BACKEND
from tests.attn_ops.backends.mla.triton.reference import DEVICE, TOLERANCE, assert_near

pytestmark = pytest.mark.skipif(BACKEND.unavailable() is not None, reason="needs TRITON_INTERPRET")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 70])
@pytest.mark.parametrize(("nope", "latent"), [(16, 32), (6, 40), (24, 300)])
def test_absorb(num_rows, nope, latent, dtype):
    from attn_ops.backends.mla.triton.absorb import absorb

    heads = 3
    q = torch.randn(num_rows, heads, nope + 8).to(dtype).to(DEVICE)[:, :, :nope]
    w = torch.randn(heads, nope + 5, latent).to(dtype).to(DEVICE)[:, :nope]
    out = absorb(q, w)
    assert out.shape == (num_rows, heads, latent)
    assert out.is_contiguous()
    if num_rows:
        wanted = torch.einsum("dnp,npl->dnl", q.double().cpu(), w.double().cpu())
        assert_near(out, wanted, TOLERANCE[dtype])
