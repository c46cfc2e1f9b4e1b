"""Queries reshaped for speculative decoding, and back."""

import itertools

import pytest
import torch

from attn_ops.metadata import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode


@pytest.mark.parametrize(("num_reqs", "query_len"), [(0, 0), (1, 1), (2, 0), (3, 4)])
def test_reshape_for_spec_decode(num_reqs, query_len):
    query_TNH = torch.randn(num_reqs * query_len, 2, 3)
    got = reshape_query_for_spec_decode(query_TNH, num_reqs)
    assert got.shape == (num_reqs, query_len, 2, 3)
    for r, t in itertools.product(range(num_reqs), range(query_len)):
        assert torch.equal(got[r, t], query_TNH[r * query_len + t])
    back = reshape_attn_output_for_spec_decode(got)
    assert torch.equal(back, query_TNH)
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
