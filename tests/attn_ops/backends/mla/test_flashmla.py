"""FLASHMLA on a CPU: how batches are handed to the library, for which a plain one stands in."""

import math
import types

import pytest
import torch

from attn_ops import get_backend
from attn_ops.backends.mla import flashmla
from attn_ops.metadata import CommonAttentionMetadata
from tests.attn_ops.backends.mla.triton.reference import TOLERANCE, assert_near, make_case

BATCHES = {
    "decode": ([1, 1, 1], [1, 70, 9]),
    "padding requests": ([1, 1, 0, 0], [5, 70, 0, 0]),
    "drafts": ([3, 3], [3, 40]),
    "ragged": ([1, 4, 0, 2], [33, 4, 9, 70]),
    "no rows": ([0, 0], [4, 0]),
}


class Library(types.ModuleType):
    """Dense attention over pages of latents by the interface of FlashMLA."""

    def __init__(self) -> None:
        super().__init__("flash_mla")
        self.shapes: list[torch.Size] = []

    def get_mla_metadata(self, cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
        return object(), None

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits, *,
        softmax_scale, causal,
    ):  # fmt: skip
        assert causal
        assert q.is_contiguous()
        assert not q.isnan().any()
        self.shapes.append(q.shape)
        out = q.new_zeros(*q.shape[:3], head_dim_v)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.inf, device=q.device)
        for request, length in enumerate(cache_seqlens.tolist()):
            latents = k_cache[block_table[request].long()].flatten(0, 2)[:length].float()
            for row in range(q.shape[1]):
                seen = latents[: max(length - q.shape[1] + row + 1, 0)]
                if len(seen):
                    scores = q[request, row].float() @ seen.T * softmax_scale
                    out[request, row] = (scores.softmax(1) @ seen[:, :head_dim_v]).to(q.dtype)
                    lse[request, :, row] = scores.logsumexp(1)
        return out, lse


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(flashmla, "find_library", lambda: library)
    return library


def batch_of(case, num_rows: int) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=case.query_start_loc,
        query_start_loc_cpu=None,
        seq_lens=case.seq_lens,
        num_reqs=len(case.query_lens),
        num_actual_tokens=num_rows,
        max_query_len=case.options["max_query_len"],
        max_seq_len=case.options["max_seq_len"],
        block_table_tensor=case.block_table,
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64, device=case.seq_lens.device),
        block_size=case.kv_cache.shape[1],
    )


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_decode(library, batch, absorbed):
    case = make_case(*batch, latent=32, rope=64)
    rows, q = sum(case.query_lens), case.ql_nope
    if absorbed:  # as `absorb` leaves it
        q = q.new_full((*q.shape[:2], 96), math.nan)[..., :32].copy_(q)
    lse = torch.full(q.shape[:2], math.nan, device=q.device)
    out = flashmla.decode(
        q, case.q_pe, case.kv_cache, batch_of(case, rows), scale=case.options["scale"],
        kv_cache_dtype="auto", kv_scale=None, lse=lse,
    )  # fmt: skip
    wanted, wanted_lse = case.wanted()
    assert out.is_contiguous()
    assert_near(out, wanted, TOLERANCE[out.dtype])
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, rtol=2e-3, atol=2e-3)
    counts = [n for n in case.query_lens if n]
    longest = max(counts, default=0)
    assert library.shapes == ([(len(case.query_lens), longest, 4, 96)] if rows else [])


def test_a_captured_batch_is_not_rearranged(library):
    """Fewer requests than were captured: a row is still that of its request."""
    case = make_case([1, 1, 0, 0], [5, 70, 0, 0], latent=32, rope=64, num_padding_rows=2)
    part = batch_of(case, 4)
    planned = flashmla.Planned(part, 4)
    assert planned.rows is None
    q = case.ql_nope.nan_to_num(0)
    out = flashmla.decode(
        q, case.q_pe.nan_to_num(0), case.kv_cache, part, scale=case.options["scale"],
        kv_cache_dtype="auto", kv_scale=None, plan=planned,
    )  # fmt: skip
    assert_near(out, case.wanted()[0], TOLERANCE[out.dtype])


def test_absorb_leaves_room_for_the_rotated_part():
    q_nope, w_uk = torch.randn(3, 4, 8), torch.randn(4, 8, 32)
    made = flashmla.absorb(q_nope, w_uk)
    torch.testing.assert_close(made, torch.einsum("dnp,npl->dnl", q_nope, w_uk))
    assert made.stride() == (4 * 96, 96, 1)


def test_what_it_needs():
    backend = get_backend("FLASHMLA")
    assert backend.unavailable() in (
        "a CUDA device must be present, got none",
        "a FlashMLA library must be installed, got none; supported: flash_mla, "
        "vllm.third_party.flashmla.flash_mla_interface",
        None,
    )
