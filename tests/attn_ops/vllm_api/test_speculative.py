"""Queries reshaped for speculative decoding, and back."""

import pytest
import torch

from attn_ops.metadata import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import batches, check


@check(batches())
def test_reshape_for_spec_decode(batch):
    """Row r * Q + t of the query is token t of request r, and back."""
    tape = batch.tape
    num_reqs, query_len = tape.below(5), tape.below(5)
    rows = brute_force.flat_rows(num_reqs, query_len)
    heads, size = 1 + tape.below(3), 1 + tape.below(3)
    query = torch.tensor([10 * r + t for r, t in rows], dtype=torch.float64)
    query_TNH = (query[:, None, None] + torch.zeros(heads, size)).contiguous()
    got = reshape_query_for_spec_decode(query_TNH, num_reqs)
    assert got.shape == (num_reqs, query_len if num_reqs else 0, heads, size)
    for r, t in rows:
        assert (got[r, t] == 10 * r + t).all()
    back = reshape_attn_output_for_spec_decode(got)
    assert back.shape == query_TNH.shape
    assert torch.equal(back, query_TNH)
    if rows:
        assert got.data_ptr() == back.data_ptr() == query_TNH.data_ptr(), "views"


def test_reshape_refuses():
    query = torch.zeros(6, 2, 4)
    assert reshape_attn_output_for_spec_decode(query) is query
    for batch_size in (4, 0, -1, -2):
        with pytest.raises(ValueError, match="batch_size"):
            reshape_query_for_spec_decode(query, batch_size)
    for wrong in (query[0], query[None]):
        with pytest.raises(ValueError, match="query"):
            reshape_query_for_spec_decode(wrong, 1)
    for wrong in (query[0], query[None, None]):
        with pytest.raises(ValueError, match="attn_output"):
            reshape_attn_output_for_spec_decode(wrong)
