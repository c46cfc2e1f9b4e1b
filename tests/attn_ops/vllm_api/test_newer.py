"""Names of vLLM 0.24, against its values and against definitions."""

import pytest
import torch

from attn_ops.metadata import (
    compute_causal_conv1d_metadata,
    get_dcp_local_seq_lens,
    make_local_attention_virtual_batches,
    make_local_attention_virtual_batches_and_block_table,
    split_prefill_chunks,
)
from tests.attn_ops.metadata.ragged import batches, check, int32


@pytest.mark.parametrize(
    ("seq_lens", "workspace", "offset", "expected"),
    [
        ([3, 4, 5, 2], 8, 0, [(0, 2), (2, 4)]),
        ([8, 8, 0, 1, 7, 0], 8, 10, [(10, 11), (11, 13), (13, 16)]),
        ([5], 5, 3, [(3, 4)]),
        ([0, 0], 1, 0, [(0, 2)]),
        ([], 5, 0, []),
    ],
)
def test_chunks_of_prefills(seq_lens, workspace, offset, expected):
    assert split_prefill_chunks(int32(seq_lens), workspace, offset) == expected


def test_a_prefill_must_fit_into_the_workspace():
    with pytest.raises(ValueError, match="seq_lens_cpu must be at most workspace_size 5, got 6"):
        split_prefill_chunks(int32([2, 6]), 5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("run", [1, 4])
def test_local_lengths_count_the_tokens_dealt_to_each_rank(ranks, run):
    lengths = list(range(40))
    dealt = [[token // run % ranks for token in range(n)] for n in lengths]
    want = int32([[owners.count(rank) for rank in range(ranks)] for owners in dealt])
    got = get_dcp_local_seq_lens(int32(lengths), ranks, None, run)
    assert torch.equal(got, want if ranks > 1 else want[:, 0])
    assert got.dtype == torch.int32
    for rank in range(ranks):
        assert torch.equal(get_dcp_local_seq_lens(int32(lengths), ranks, rank, run), want[:, rank])


def test_local_lengths_of_a_rank_that_does_not_exist():
    for ranks, rank, run in ((2, 2, 1), (2, -1, 1), (0, None, 1), (2, 0, 0)):
        with pytest.raises(ValueError, match="must be"):
            get_dcp_local_seq_lens(int32([3]), ranks, rank, run)


@check(batches())
def test_virtual_batches_and_their_table(batch):
    common = batch.common()
    chunk = batch.block_size * batch.tape.pick([1, 2, 4])
    made, table_of = make_local_attention_virtual_batches_and_block_table(
        chunk, common, batch.block_size
    )
    want = make_local_attention_virtual_batches(chunk, common, batch.block_size)
    assert torch.equal(made.seq_lens, want.seq_lens)
    assert torch.equal(made.block_table_tensor, want.block_table_tensor)
    other = common.block_table_tensor + 100
    assert torch.equal(table_of(common.block_table_tensor), want.block_table_tensor)
    assert torch.equal(
        table_of(other),
        make_local_attention_virtual_batches(
            chunk, common.replace(block_table_tensor=other), batch.block_size
        ).block_table_tensor,
    )


def test_convolutions_take_the_mirror_and_a_device():
    """The device is not read."""
    starts = int32([0, 3, 20])
    for given in (
        {"query_start_loc_p": starts, "device": "meta"},
        {"query_start_loc_p": starts.to("meta"), "query_start_loc_cpu": starts},
    ):
        programs, *tensors = compute_causal_conv1d_metadata(**given)
        assert programs[8]["mlist"].tolist() == [0, 1, 1, 1]
        assert [tensor.device.type for tensor in tensors] == ["meta", "meta"]
