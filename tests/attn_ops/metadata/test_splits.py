"""Decodes and prefills brought into order and told apart."""

import dataclasses
import types

import numpy as np
import pytest
import torch

from attn_ops.metadata import (
    CommonAttentionMetadata,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
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

    req_ids: list
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


def by_context(requests: list[tuple[int, int, int]], threshold: int = 1) -> tuple[bool, list[int]]:
    """Requests of (scheduled, computed, prompt) tokens, reordered: modified, and their order."""
    scheduled, computed, prompt = np.array(requests).reshape(-1, 3).T
    names = list(range(len(requests)))
    input_batch = InputBatch(names)
    input_batch.num_computed_tokens_cpu = np.append(computed, 9)  # engines' arrays are longer
    input_batch.num_prompt_tokens = np.append(prompt, 9)
    scheduler_output = types.SimpleNamespace(
        num_scheduled_tokens=dict(zip(names, scheduled.tolist(), strict=True))
    )
    modified = reorder_batch_to_split_decodes_and_prefills(
        input_batch, scheduler_output, threshold, by_context=True
    )
    return modified, names


PREFILL, LONG, SHORT, DECODE = (9, 0, 9), (9, 5, 20), (1, 5, 20), (1, 20, 20)


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        ([(1, 0, 1), (1, 50, 50)], [1, 0]),
        ([PREFILL, LONG, SHORT, DECODE], [3, 2, 1, 0]),
        ([PREFILL, DECODE, LONG, SHORT, DECODE, (1, 0, 4), SHORT], [4, 1, 6, 3, 2, 5, 0]),
        ([DECODE, DECODE, SHORT, LONG, PREFILL], [0, 1, 2, 3, 4]),
        ([], []),
    ],
)
def test_reorder_by_context_as_vllm_0_24_does(requests, order):
    """Orders that vLLM 0.24.0 gives; a request that stands right stays."""
    assert by_context(requests) == (order != sorted(order), order)


@check(batches())
def test_reorder_by_context_moves_only_what_stands_wrong(batch):
    tape = batch.tape
    kinds = [tape.pick([PREFILL, LONG, SHORT, DECODE]) for _ in batch.query_lens]
    regions = [[DECODE, SHORT, LONG, PREFILL].index(kind) for kind in kinds]
    wrong = [i for i, region in enumerate(regions) if region != sorted(regions)[i]]
    want = dict(zip(wrong, sorted(wrong, key=regions.__getitem__), strict=True))
    assert by_context(kinds) == (bool(wrong), [want.get(i, i) for i in range(len(kinds))])


def test_reorder_by_context_needs_the_lengths():
    with pytest.raises(ValueError, match="num_computed_tokens_cpu and num_prompt_tokens"):
        reorder_batch_to_split_decodes_and_prefills(
            InputBatch([0]), types.SimpleNamespace(num_scheduled_tokens={0: 1}), by_context=True
        )


@pytest.mark.parametrize(
    ("query_lens", "prefilling", "threshold", "uniform", "expected"),
    [
        ([1, 1, 1], [0, 1, 1], 1, False, (1, 2, 1, 2)),
        ([1, 1, 1], [0, 0, 0], 1, False, (3, 0, 3, 0)),
        ([2, 1, 5], [0, 1, 1], 2, False, (1, 2, 2, 6)),
        ([5, 1, 1], [1, 0, 0], 1, False, (0, 3, 0, 7)),
        ([2, 2, 2, 1], [0, 0, 1, 0], 2, True, (2, 2, 4, 3)),
        ([2, 2], [1, 1], 2, True, (2, 0, 4, 0)),
    ],
)
def test_short_extends_may_count_as_prefills(query_lens, prefilling, threshold, uniform, expected):
    table = int32([[1, 2]] * len(query_lens))
    common = CommonAttentionMetadata.from_lengths(query_lens, [9] * len(query_lens), table, 8)
    with pytest.raises(ValueError, match="is_prefilling must be given on the CPU"):
        split_decodes_and_prefills(common, threshold, uniform, False)
    common.is_prefilling = torch.tensor(prefilling, dtype=torch.bool)
    got = split_decodes_and_prefills(
        common, threshold, uniform, treat_short_extends_as_decodes=False
    )
    assert got == expected
    assert all(type(number) is int for number in got)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "threshold", "expected"),
    [
        ([1, 1], [5, 1], 1, (2, 0, 0, 2, 0, 0)),
        ([1, 3, 4, 6], [5, 9, 4, 6], 1, (1, 1, 2, 1, 3, 10)),
        ([1, 3, 4], [5, 9, 8], 1, (1, 2, 0, 1, 7, 0)),
        ([4, 6], [4, 6], 1, (0, 0, 2, 0, 0, 10)),
        ([2, 1, 3, 5], [9, 1, 8, 5], 2, (2, 1, 1, 3, 3, 5)),
        ([], [], 1, (0, 0, 0, 0, 0, 0)),
    ],
)
@pytest.mark.parametrize("bound", [False, True])
def test_decodes_extends_prefills(query_lens, seq_lens, threshold, expected, bound):
    table = int32([[1, 2]] * len(query_lens)).view(-1, 2)
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, 8)
    if bound:
        common.seq_lens_cpu_upper_bound, common.seq_lens_cpu = common.seq_lens_cpu, None
    got = split_decodes_prefills_and_extends(common, threshold)
    assert got == expected
    assert all(type(number) is int for number in got)


def test_extends_need_the_lengths():
    common = CommonAttentionMetadata.from_lengths([2], [2], int32([[1]]), 8)
    common.seq_lens_cpu = None
    assert split_decodes_prefills_and_extends(common, 2) == (1, 0, 0, 2, 0, 0)
    with pytest.raises(ValueError, match="seq_lens_cpu or seq_lens_cpu_upper_bound must be given"):
        split_decodes_prefills_and_extends(common)
