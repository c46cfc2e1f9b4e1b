"""Decodes and prefills told apart."""

import pytest

from attn_ops.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import batches, check, int32, snapshot


@check(batches())
def test_split_decodes_and_prefills(batch):
    tape = batch.tape
    common = batch.common()
    common.num_actual_tokens = tape.pick([batch.num_tokens, batch.num_rows])
    common.max_query_len += tape.pick([0, 0, 2])  # an upper bound will do
    threshold, uniform = tape.pick([1, 1, 2, 3, 4, 8, 12]), bool(tape.below(2))
    before = snapshot(common)
    got = split_decodes_and_prefills(common, decode_threshold=threshold, require_uniform=uniform)
    expected = brute_force.split_decodes(
        batch.query_lens, common.num_actual_tokens, common.max_query_len, threshold, uniform
    )
    assert got == expected
    assert all(type(number) is int for number in got)
    assert snapshot(common) == before


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "expected"),
    [
        ([1, 1, 1], 1, False, (3, 0, 3, 0)),
        ([1, 1, 5], 1, False, (2, 1, 2, 5)),
        ([5, 1, 1], 1, False, (0, 3, 0, 7)),
        ([1, 3, 2, 6, 1], 3, False, (3, 2, 6, 7)),
        ([3, 3, 2, 6], 3, True, (2, 2, 6, 8)),
        ([3, 3, 3], 3, True, (3, 0, 9, 0)),
        ([3, 3, 0], 3, True, (2, 1, 6, 0)),
        ([3, 3, 0, 0, 1], 3, True, (2, 3, 6, 1)),
        ([4, 4, 0], 3, True, (0, 3, 0, 8)),
        ([0, 0, 2], 3, True, (2, 1, 0, 2)),
        ([], 1, False, (0, 0, 0, 0)),
        ([], 4, True, (0, 0, 0, 0)),
    ],
)
def test_split_by_hand(query_lens, threshold, uniform, expected):
    table = int32([[1, 2]] * len(query_lens)).view(-1, 2)
    common = CommonAttentionMetadata.from_lengths(query_lens, query_lens, table, 8)
    assert split_decodes_and_prefills(common, threshold, uniform) == expected


def test_split_needs_the_mirror_unless_the_maximum_decides():
    common = CommonAttentionMetadata.from_lengths([2, 1], [2, 1], int32([[1], [2]]), 8)
    common.query_start_loc_cpu = None
    assert split_decodes_and_prefills(common, 2) == (2, 0, 3, 0)
    for threshold, uniform in ((1, False), (2, True)):
        with pytest.raises(ValueError, match="query_start_loc_cpu"):
            split_decodes_and_prefills(common, threshold, uniform)
    common.max_query_len = 1
    assert split_decodes_and_prefills(common, 1, True) == (2, 0, 3, 0)
