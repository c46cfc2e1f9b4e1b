"""TRITON_MLA through the operators against the float64 reference; interpreted without a GPU."""

import pytest
import torch

from attn_ops import get_backend, mla_attention, mla_attention_with_lse
from attn_ops.backends.mla import plan as planning
from attn_ops.backends.mla import triton_mla
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import AttentionSpec
from tests.kit.latent import SMALL, LatentBatch, build_latent_batch

pytestmark = pytest.mark.skipif(
    get_backend("TRITON_MLA").missing() is not None, reason="needs TRITON_INTERPRET"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCHES = {
    "decodes": ([1, 1, 1, 1], [1, 2, 17, 70]),
    "unsorted": ([30, 1, 0, 12, 1, 20], [61, 33, 0, 12, 9, 90]),
}


@pytest.fixture(autouse=True)
def way_by_query_length(monkeypatch):
    """Queries of more than 8 tokens take the prefill way, whatever is measured."""
    monkeypatch.setattr(planning, "SHORT_QUERY_LEN", 8)
    monkeypatch.setattr(planning, "LONG_CONTEXT_QUERY_LEN", 0)


def batch(name: str) -> LatentBatch:
    dtype = torch.float16
    workspace = MLAWorkspace([AttentionSpec.of_latent(3, SMALL, dtype)], 1024, DEVICE)
    more = {"backend": "TRITON_MLA", "device": DEVICE, "workspace": workspace, "dtype": dtype}
    return build_latent_batch(*BATCHES[name], num_padding_rows=2, block_size=16, **more)


def check(b: LatentBatch) -> None:
    want_lse = torch.empty(b.q.shape[:2], device=DEVICE)
    want = reference_mla_attention(b.q, b.kv_cache, b.common, b.options(lse=want_lse))
    out, lse = mla_attention_with_lse(*b.arguments, **b.keywords)
    assert torch.equal(mla_attention(*b.arguments, **b.keywords), out)
    assert out.is_contiguous()
    assert (out.double() - want).norm() <= 4e-3 * want.norm()
    torch.testing.assert_close(lse, want_lse, rtol=4e-3, atol=4e-3)
    assert (out[b.common.num_actual_tokens :] == 0).all()


def test_every_way_of_a_short_query(monkeypatch):
    """40 rows of a request over the latents themselves."""
    monkeypatch.setattr(planning, "SHORT_QUERY_LEN", 100)
    check(batch("unsorted"))


@pytest.mark.parametrize("name", ["decodes", "unsorted"])
def test_absorbed_by_our_kernel(name, monkeypatch):
    monkeypatch.setattr(triton_mla, "ABSORB_ROWS", 64)
    check(batch(name))


def test_columns_that_are_not_contiguous_are_refused():
    b = batch("decodes")
    wide = torch.zeros(*b.q.shape, 2, dtype=b.q.dtype, device=DEVICE)[..., 0]
    with pytest.raises(ValueError, match="stride of q"):
        mla_attention(wide, *b.arguments[1:], **b.keywords)
