"""Buffers that a batch's tensors live in: views of them, and what is no view."""

import dataclasses

import pytest
import torch

from attn_ops.metadata import (
    CommonAttentionMetadata,
    MetadataBuffers,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
)
from tests.attn_ops.metadata.ragged import int32, int64

from_lengths = CommonAttentionMetadata.from_lengths


@pytest.fixture
def buffers() -> MetadataBuffers:
    out = MetadataBuffers.allocate(4, 8, 4)
    out.block_table.copy_(torch.arange(16).view(4, 4) + 100)
    return out


def test_a_table_in_place_is_used_in_place(buffers):
    got = from_lengths([1, 1], [1, 3], buffers.block_table[:2], 2, out=buffers)
    assert got.slot_mapping.tolist() == [200, 105 * 2]
    assert got.block_table_tensor.data_ptr() == buffers.block_table.data_ptr()
    assert buffers.block_table[2:].tolist() == (torch.arange(8, 16).view(2, 4) + 100).tolist()
    got = from_lengths([1], [1], buffers.block_table[:1], 2, num_padded_reqs=2, out=buffers)
    assert got.block_table_tensor.tolist() == [[100, 101, 102, 103], [0] * 4]


@pytest.mark.parametrize(
    "part",
    [
        (slice(None, None, 2), slice(None)),
        (slice(2, 4), slice(None)),
        (slice(2), slice(2, None)),
        (slice(2), slice(2)),
        (slice(1, 3), slice(None)),
    ],
)
def test_another_part_of_the_buffers_is_no_table(buffers, part):
    before = [t.clone() for t in (buffers.lengths, buffers.block_table, buffers.slot_mapping)]
    with pytest.raises(ValueError, match="block_table must be the first rows"):
        from_lengths([1, 1], [1, 1], buffers.block_table[part], 2, out=buffers)
    after = (buffers.lengths, buffers.block_table, buffers.slot_mapping)
    assert all(map(torch.equal, before, after))


def test_strided_tensors_are_refused():
    good = from_lengths([4, 10], [6, 12], torch.arange(20, dtype=torch.int32).view(2, 10), 2)
    strided = {
        "block_table_tensor": torch.arange(20, dtype=torch.int32).view(10, 2).t(),
        "query_start_loc": int32([[0, 4], [4, 17], [14, 0]])[:, 0],
        "logits_indices_padded": int64([[3, 0], [13, 1]])[:, 0],
    }
    for name, tensor in strided.items():
        with pytest.raises(ValueError, match=f"^{name} must have contiguous entries"):
            good.replace(**{name: tensor})
    with pytest.raises(ValueError, match="block_table must have contiguous"):
        dataclasses.replace(
            MetadataBuffers.allocate(2, 2, 2), block_table=strided["block_table_tensor"]
        )


def test_results_do_not_overwrite_the_batch_that_they_are_made_of():
    out = MetadataBuffers.allocate(8, 16, 8)
    common = from_lengths(
        [4, 10], [6, 12], torch.arange(16, dtype=torch.int32).view(2, 8), 2, out=out
    )
    with pytest.raises(ValueError, match="out must not be the buffers of the batch"):
        make_local_attention_virtual_batches(4, common, out=out)
    common.logits_indices_padded, common.num_logits_indices = int64([3, 13]), 2
    with pytest.raises(ValueError, match="out must not be the buffers of the batch"):
        make_kv_sharing_fast_prefill_common_attn_metadata(common, out=out)
    assert common.query_start_loc.tolist() == [0, 4, 14]


def test_columns_that_no_length_needs_are_cut():
    table = [[7, 9, 3], [5, 8, 2]]
    buffers = MetadataBuffers.allocate(2, 4, 2)
    common = CommonAttentionMetadata.from_lengths([1, 3], [8, 5], table, 4, out=buffers)
    assert common.block_table_tensor.tolist() == [[7, 9], [5, 8]]
    assert common.slot_mapping.tolist() == [39, 22, 23, 32]
    for wide in (table, int32(table)):
        with pytest.raises(ValueError, match="out must have room for 3 blocks a request, got 2"):
            CommonAttentionMetadata.from_lengths([1, 3], [8, 9], wide, 4, out=buffers)
