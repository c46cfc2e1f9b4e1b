"""Decodes and prefills brought into order and told apart."""

import dataclasses
import types

import pytest

from attn_ops.metadata import (
    CommonAttentionMetadata,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
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


@dataclasses.dataclass
class InputBatch:
    """What an engine's batch offers: requests in order, and a swap of two of them."""

    req_ids: list[str]
    swaps: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def swap_states(self, i: int, j: int) -> None:
        self.swaps.append((i, j))
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]


@check(batches())
def test_reorder_batch(batch):
    threshold = batch.tape.pick([1, 1, 2, 4])
    names = [f"request {i}" for i in range(batch.num_reqs)]
    tokens = dict(zip(names, batch.query_lens, strict=True))
    input_batch = InputBatch(list(names))
    scheduler_output = types.SimpleNamespace(num_scheduled_tokens=dict(tokens))
    modified = reorder_batch_to_split_decodes_and_prefills(
        input_batch, scheduler_output, decode_threshold=threshold
    )
    is_decode = [tokens[name] <= threshold for name in input_batch.req_ids]
    assert is_decode == sorted(is_decode, reverse=True), "decodes first"
    assert sorted(input_batch.req_ids) == sorted(names)
    num_decodes = sum(is_decode)
    behind = sum(query <= threshold for query in batch.query_lens[num_decodes:])
    assert len(input_batch.swaps) == behind, "as few swaps as there are decodes behind their place"
    assert input_batch.swaps == brute_force.decode_first_swaps(batch.query_lens, threshold)
    assert modified is (behind > 0)
    assert scheduler_output.num_scheduled_tokens == tokens


def test_reorder_batch_by_hand():
    input_batch = InputBatch(["p0", "d0", "p1", "d1", "d2"])
    scheduler_output = types.SimpleNamespace(
        num_scheduled_tokens={"p0": 7, "d0": 1, "p1": 4, "d1": 1, "d2": 1}
    )
    assert reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output) is True
    assert input_batch.req_ids == ["d2", "d0", "d1", "p1", "p0"]
    assert reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output) is False
