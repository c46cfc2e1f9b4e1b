"""A batch cut into micro-batches, against the same batch with the other tokens left out."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from attn_ops.metadata import (
    CommonAttentionMetadata,
    UBatchSlice,
    _make_metadata_with_slice,
    slice_query_start_locs,
    split_attn_metadata,
)
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import (
    Ragged,
    assert_fields,
    batches,
    check,
    int32,
    int64,
    snapshot,
)

from_lengths = CommonAttentionMetadata.from_lengths


@dataclasses.dataclass
class Cut:
    """Requests [first, stop) and rows [first_row, stop_row) of a batch."""

    requests: range
    rows: range

    @property
    def slice(self) -> UBatchSlice:
        return UBatchSlice(
            slice(self.requests.start, self.requests.stop), slice(self.rows.start, self.rows.stop)
        )


def read_cut(batch: Ragged) -> Cut:
    """A slice that starts in its first request and ends in its last; its rows may be none."""
    tape, starts, query_lens = batch.tape, batch.starts, batch.query_lens
    first = tape.below(batch.num_reqs)
    stop = first + 1 + tape.below(batch.num_reqs - first)
    first_row = starts[first] + tape.below(query_lens[first])
    stop_row = starts[stop - 1]
    if query_lens[stop - 1]:
        stop_row += 1 + tape.below(query_lens[stop - 1])
    if stop == batch.num_reqs and tape.below(3) == 2:
        stop_row = starts[-1] + tape.below(batch.num_rows - starts[-1] + 1)
    return Cut(range(first, stop), range(first_row, stop_row))


def expected_of(batch: Ragged, cut: Cut, common: CommonAttentionMetadata) -> dict[str, Any]:
    lens = brute_force.ubatch(batch.query_lens, batch.seq_lens, cut.requests, cut.rows)
    starts = brute_force.starts(lens["query_lens"])
    rows = slice(cut.rows.start, cut.rows.stop)
    requests = slice(cut.requests.start, cut.requests.stop)
    positions, slots = batch.positions_and_slots
    longest = max(lens["query_lens"])
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens["seq_lens"],
        "seq_lens_cpu": lens["seq_lens"],
        "num_computed_tokens_cpu": lens["num_computed"],
        "num_computed_tokens": lens["num_computed"],
        "num_reqs": len(cut.requests),
        "num_actual_tokens": starts[-1],
        "max_query_len": longest or common.max_query_len,  # only padding rows: a dummy run
        "max_seq_len": max(lens["seq_lens"]),
        "block_table_tensor": batch.table[requests],
        "slot_mapping": slots[rows],
        "positions": positions[rows],
        "causal": common.causal,
        "block_size": batch.block_size,
    }


@check(batches())
def test_make_metadata_with_slice(batch):
    causal = bool(batch.tape.below(2))
    common = batch.common(causal=causal)
    if batch.num_reqs == 0:
        with pytest.raises(ValueError, match="slice"):
            _make_metadata_with_slice(UBatchSlice(slice(0, 1), slice(0, 1)), common)
        return
    cut = read_cut(batch)
    before = snapshot(common)
    if len(cut.rows) == 0:
        with pytest.raises(ValueError, match="slice"):
            _make_metadata_with_slice(cut.slice, common)
        return
    got = _make_metadata_with_slice(cut.slice, common)
    assert_fields(got, **expected_of(batch, cut, common))
    assert snapshot(common) == before


def read_partition(batch: Ragged) -> list[Cut]:
    """All rows with a token dealt to two or three micro-batches, wherever the cuts fall."""
    tape, num_tokens = batch.tape, batch.num_tokens
    places = sorted({1 + tape.below(num_tokens - 1) for _ in range(1 + tape.below(2))})
    edges = [0, *[place for place in places if place < num_tokens], num_tokens]
    owner = [request for request, _ in brute_force.tokens(batch.query_lens, batch.seq_lens)]
    return [
        Cut(range(owner[start], owner[stop - 1] + 1), range(start, stop))
        for start, stop in itertools.pairwise(edges)
    ]


@check(batches())
def test_split_attn_metadata(batch):
    """Together the micro-batches attend the very keys, for the very rows, of the whole batch."""
    if batch.num_tokens == 0:
        assert split_attn_metadata([], batch.common()) == []
        return
    common = batch.common()
    before = snapshot(common)
    cuts = read_partition(batch)
    parts = split_attn_metadata([cut.slice for cut in cuts], common)
    keys, slots = [], []
    for cut, part in zip(cuts, parts, strict=True):
        assert_fields(part, **expected_of(batch, cut, common))
        keys += brute_force.causal_key_slots(
            part.query_lens.tolist(),
            part.seq_lens.tolist(),
            part.block_table_tensor.tolist(),
            batch.block_size,
        )
        slots += part.slot_mapping.tolist()
    assert keys == brute_force.causal_key_slots(
        batch.query_lens, batch.seq_lens, batch.table, batch.block_size
    )
    assert slots == batch.positions_and_slots[1][: batch.num_tokens]
    assert snapshot(common) == before


@check(batches())
def test_optional_fields_are_cut_alike(batch):
    if batch.num_reqs == 0:
        return
    numbers = torch.arange(batch.num_reqs, dtype=torch.int32)
    common = batch.common(
        seq_lens_cpu_upper_bound=int32(batch.seq_lens) + numbers,
        is_prefilling=numbers % 2 == 0,
        dcp_local_seq_lens=numbers + 50,
        encoder_seq_lens=(numbers + 100).numpy(),
        **batch.logits_fields(),
    )
    before = str(snapshot(common))
    cut = read_cut(batch)
    if len(cut.rows) == 0:
        return
    got = _make_metadata_with_slice(cut.slice, common)
    requests = slice(cut.requests.start, cut.requests.stop)
    assert got.is_prefilling.tolist() == common.is_prefilling[requests].tolist()
    assert np.array_equal(got.encoder_seq_lens, common.encoder_seq_lens[requests])
    if got.seq_lens.tolist() == batch.seq_lens[requests] and cut.rows.start in batch.starts:
        assert got.dcp_local_seq_lens.tolist() == common.dcp_local_seq_lens[requests].tolist()
        upper = common.seq_lens_cpu_upper_bound[requests].tolist()
        assert got.seq_lens_cpu_upper_bound.tolist() == upper
    elif got.seq_lens.tolist() != batch.seq_lens[requests]:
        assert got.dcp_local_seq_lens is None, "it follows from a seq_len that is another now"
    assert got.seq_lens_cpu_upper_bound is not None
    assert (got.seq_lens_cpu_upper_bound >= got.seq_lens_cpu).all()
    rows = [row - cut.rows.start for row in batch.logits_rows if row in cut.rows]
    assert got.logits_indices_cpu.tolist() == rows
    assert got.num_logits_indices == len(rows)
    assert got.logits_indices_padded[: len(rows)].tolist() == rows
    assert str(snapshot(common)) == before


def test_logits_indices_that_only_the_device_knows_are_dropped():
    common = from_lengths([3, 2], [3, 2], int32([[1], [1]]), 4, device="meta")
    common = common.replace(logits_indices_padded=int64([2, 4]).to("meta"), num_logits_indices=2)
    got = _make_metadata_with_slice(UBatchSlice(slice(0, 2), slice(1, 5)), common)
    assert got.logits_indices_padded is None
    assert got.num_logits_indices is None
    assert got.query_start_loc_cpu.tolist() == [0, 2, 4]


@check(batches())
def test_slice_query_start_locs(batch):
    first = batch.tape.below(batch.num_reqs + 1)
    stop = first + batch.tape.below(batch.num_reqs - first + 1)
    starts = int32(batch.starts)
    got = slice_query_start_locs(starts, slice(first, stop))
    assert got.tolist() == brute_force.starts(batch.query_lens[first:stop])
    assert got.dtype == torch.int32
    got += 1
    assert starts.tolist() == batch.starts, "a new tensor"


def test_ubatch_slice():
    one = UBatchSlice(slice(1, 3), slice(4, 9))
    assert one.num_tokens == 5
    assert not one.is_empty()
    assert UBatchSlice(slice(1, 1), slice(4, 9)).is_empty()
    assert UBatchSlice(slice(1, 3), slice(4, 4)).is_empty()


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        (slice(0, 1), slice(2, 3)),  # starts behind its first request
        (slice(0, 3), slice(2, 4)),  # starts behind its first request, ends in its last
        (slice(2, 3), slice(1, 4)),  # starts before its first request
        (slice(0, 1), slice(0, 3)),  # ends behind its last request
        (slice(0, 3), slice(0, 2)),  # ends before its last request
        (slice(0, 2), slice(0, 1)),  # ends before its last request, which is empty
        (slice(1, 3), slice(1, 4)),  # starts before its first request, which is empty
        (slice(3, 5), slice(7, 10)),
        (slice(3, 4), slice(7, 13)),
        (slice(2, 3), slice(2, 11)),  # padding rows belong to the last request's slice
        (slice(-1, 4), slice(7, 10)),
        (slice(0, 1), slice(-2, 2)),
        (slice(0, 4, 2), slice(0, 10)),
        (slice(0, 1), slice(0, 2, 2)),
        (slice(2, 2), slice(2, 4)),
        (slice(2, 3), slice(4, 4)),
        (slice(3, 2), slice(2, 4)),
        (slice(2, 3), slice(5, 4)),
    ],
)
def test_slices_that_do_not_fit(requests, tokens):
    """Of a batch of requests of 2, 0, 5 and 3 queries and two padding rows."""
    lens = [2, 0, 5, 3]
    common = from_lengths(lens, lens, int32([[1], [0], [3], [4]]), 8, num_padded_tokens=12)
    with pytest.raises(ValueError, match="slice"):
        split_attn_metadata([UBatchSlice(requests, tokens)], common)


def test_a_slice_needs_the_mirrors():
    common = from_lengths([2], [2], int32([[1]]), 8)
    common.query_start_loc_cpu = None
    with pytest.raises(ValueError, match="query_start_loc_cpu"):
        _make_metadata_with_slice(UBatchSlice(slice(0, 1), slice(0, 2)), common)


def test_micro_batches_and_logits_rows():
    common = from_lengths([1, 2], [5, 2], [[1, 2], [3, 4]], 4)
    whole = UBatchSlice(slice(0, 2), slice(0, 3))
    captured = common.replace(
        logits_indices_padded=int64([0, 2, 0, 0]), num_logits_indices=4, num_logits=int32([2])
    )
    got = _make_metadata_with_slice(whole, captured)
    assert got.logits_indices_padded is None, "how many count, only the device knows"
    assert got.num_logits_indices is None
    rows = int64([0, 2])
    known = common.replace(logits_indices=rows, logits_indices_padded=rows, num_logits_indices=2)
    got = _make_metadata_with_slice(whole, known)
    kept = (got.logits_indices, got.logits_indices_padded, got.logits_indices_cpu)
    assert [t.tolist() for t in kept] == [[0, 2]] * 3
    assert len({t.data_ptr() for t in (*kept, rows)}) == 4


def test_blocks_of_windows_are_cut_like_those_of_other_layers():
    tables = int32([[1, 2], [3, 4]]), int32([[5, 6], [7, 8]])
    common, own = (from_lengths([1, 4], [5, 4], table, 4) for table in tables)
    split = common.replace(
        window_block_table_tensor=own.block_table_tensor, window_slot_mapping=own.slot_mapping
    )
    for requests, tokens in ((slice(0, 2), slice(0, 3)), (slice(1, 2), slice(2, 5))):
        cut = UBatchSlice(requests, tokens)
        got = _make_metadata_with_slice(cut, split).of_windows()
        want = _make_metadata_with_slice(cut, own)
        assert torch.equal(got.block_table_tensor, want.block_table_tensor)
        assert torch.equal(got.slot_mapping, want.slot_mapping)


def test_padding_cut_in_two():
    common = from_lengths([3, 3], [9, 3], [[1, 2, 3], [0, 0, 0]], 4)
    for lens in (common.seq_lens, common.seq_lens_cpu):
        lens[1] = 0
    common.num_computed_tokens_cpu = int32([6, 0])
    parts = (slice(0, 4), slice(4, 6))
    for requests, tokens in zip((slice(0, 2), slice(1, 2)), parts, strict=True):
        got = _make_metadata_with_slice(UBatchSlice(requests, tokens), common)
        assert got.seq_lens[-1] == got.seq_lens_cpu[-1] == got.num_computed_tokens_cpu[-1] == 0


@pytest.mark.parametrize("part", [(None, 2), (0, -1), (0, 9), (0, 2, 1)])
def test_slices_of_starts_that_do_not_fit(part):
    with pytest.raises(ValueError, match="request_slice must"):
        slice_query_start_locs(int32([0, 1, 3]), slice(*part))
