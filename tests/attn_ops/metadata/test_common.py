"""A batch from its lengths, cut and copied, against the loop over tokens; what its form must be."""

import dataclasses

import numpy as np
import pytest
import torch

from attn_ops.metadata import CommonAttentionMetadata, MetadataBuffers, positions_of_step
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import (
    Ragged,
    assert_fields,
    assert_is_view,
    batches,
    check,
    int32,
    int64,
    snapshot,
)


def expected_of_lengths(batch: Ragged, num_reqs: int, num_rows: int) -> dict:
    """Every field of `from_lengths`, with requests and rows up to these numbers as padding."""
    empty = [0] * (num_reqs - batch.num_reqs)
    query, seq = batch.query_lens + empty, batch.seq_lens + empty
    table = batch.table + [[0] * batch.width for _ in empty]
    positions, slots = brute_force.positions_and_slots(
        query, seq, table, batch.block_size, num_rows
    )
    return {
        "query_start_loc": brute_force.starts(query),
        "query_start_loc_cpu": brute_force.starts(query),
        "seq_lens": seq,
        "seq_lens_cpu": seq,
        "num_computed_tokens_cpu": batch.computed + empty,
        "query_lens": query,
        "num_computed_tokens": batch.computed + empty,
        "num_reqs": num_reqs,
        "batch_size": num_reqs,
        "num_actual_tokens": batch.num_tokens,
        "max_query_len": max([0, *query]),
        "max_seq_len": max([0, *seq]),
        "slot_mapping": slots,
        "positions": positions,
        "block_size": batch.block_size,
        "causal": True,
        "logits_indices": None,
        "logits_indices_padded": None,
        "block_table_tensor": table,
    }


@check(batches())
def test_from_lengths(batch):
    num_reqs = batch.num_reqs + batch.tape.below(3)
    arguments = batch.query_lens, batch.seq_lens, batch.table_tensor(), batch.block_size
    padding = {"num_padded_tokens": batch.num_rows, "num_padded_reqs": num_reqs}
    if batch.num_rows == batch.num_tokens and num_reqs == batch.num_reqs:
        padding = {}
    common = CommonAttentionMetadata.from_lengths(*arguments, **padding)
    assert_fields(common, **expected_of_lengths(batch, num_reqs, batch.num_rows))
    lens, computed = np.array(batch.query_lens, np.int32), np.array(batch.computed, np.int32)
    on_host = positions_of_step(lens, computed, np.array(batch.starts))
    assert on_host.tolist() == batch.positions_and_slots[0][: batch.num_tokens]


@check(batches())
def test_from_lengths_into_buffers(batch):
    """Twice into the same buffers: addresses stay and nothing of the first batch is left."""
    num_reqs = batch.num_reqs + batch.tape.below(3)
    room = [batch.tape.below(3) for _ in range(3)]
    out = MetadataBuffers.allocate(
        num_reqs + room[0], batch.num_rows + room[1], batch.width + room[2], "cpu"
    )
    full = Ragged(
        query_lens=[1] * num_reqs, seq_lens=[1] * num_reqs, table=[[7]] * num_reqs,
        block_size=1, num_rows=num_reqs, logits_rows=[], num_garbage=0, tape=batch.tape,
    )  # fmt: skip
    for other in (full, batch):
        if other.num_rows > out.slot_mapping.shape[0] or out.block_table.shape[1] < other.width:
            continue
        common = CommonAttentionMetadata.from_lengths(
            other.query_lens,
            other.seq_lens,
            other.table_tensor(),
            other.block_size,
            num_padded_tokens=other.num_rows,
            num_padded_reqs=num_reqs,
            out=out,
        )
        expected = expected_of_lengths(other, num_reqs, other.num_rows)
        table = expected.pop("block_table_tensor")
        assert_fields(common, **expected)
        assert common.block_table_tensor[:, : other.width].tolist() == table
        assert not common.block_table_tensor[:, other.width :].any()
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "positions"):
        assert_is_view(getattr(common, name), getattr(out, name))
    assert_is_view(common.block_table_tensor, out.block_table)


def test_mirrors_stand_alone():
    """A step changes the device tensors in place, and a caller its arrays for the next one."""
    table, query, seq = int32([[1], [2]]), np.array([1, 1], np.int32), np.array([2, 3], np.int32)
    common = CommonAttentionMetadata.from_lengths(query, seq, table, 4)
    query.fill(0), seq.fill(0)
    assert common.seq_lens.tolist() == [2, 3]
    common.seq_lens.add_(1)
    common.query_start_loc.add_(1)
    common.block_table_tensor.zero_()
    assert common.seq_lens_cpu.tolist() == [2, 3]
    assert common.query_start_loc_cpu.tolist() == [0, 1, 2]
    assert common.num_computed_tokens_cpu.tolist() == [1, 2]
    assert table.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("query", "seq", "table", "block_size", "keywords", "message"),
    [
        ([1], [1, 2], [[1]], 4, {}, "seq_lens must have 1 entries like query_lens, got 2"),
        ([3], [2], [[1]], 4, {}, r"seq_lens\[0\]"),
        ([1, 3], [1, 2], [[1], [2]], 4, {}, r"at least query_lens, got seq_lens\[1\]=2 and query"),
        ([-1], [2], [[1]], 4, {}, r"query_lens\[0\]"),
        ([1, -1], [1, 2], [[1], [2]], 4, {}, r"query_lens\[1\]=-1"),
        ([1.5], [2], [[1]], 4, {}, "query_lens"),
        ([[1]], [[1]], [[1]], 4, {}, "query_lens"),
        ([2**31], [2**31], [[1]], 4, {}, "query_lens"),
        ([1, 1 - 2**32], [1, 1], [[1], [2]], 4, {}, "query_lens"),
        ([2**30] * 2, [2**30] * 2, [[1], [1]], 2**30, {}, "query_lens"),
        ([5], [-(2**31)], [[1]], 4, {}, "seq_lens"),
        ([1, 1], [1, 2**31], [[1], [2]], 4, {}, "seq_lens"),
        ([1, 1], [2, 1 - 2**32], [[1], [2]], 4, {}, "seq_lens"),
        (
            [1, 1],
            [1, 9],
            [[1, 2]] * 2,
            4,
            {},
            r"got seq_lens\[1\]=9; supported: up to 8",
        ),
        ([1], [1], [[1], [2]], 4, {}, r"block_table must have shape \[1, any\], got \[2, 1\]"),
        ([1], [1], int32([1]), 4, {}, r"block_table must have shape \[1, any\], got \[1\]"),
        ([1], [1], int64([[2**32 + 7]]), 4, {}, "block_table"),
        ([1], [1], [[1.5]], 4, {}, "block_table"),
        ([1, 1], [3, 2], [[1, -7], [-1, 2]], 4, {}, r"got block_table\[1\]\[0\]=-1"),
        ([1], [1], [[1]], 0, {}, "block_size"),
        ([1], [1], [[1]], 4.0, {}, "block_size"),
        (
            [3],
            [3],
            [[1]],
            4,
            {"num_padded_tokens": 2},
            "must be at least 3, got 2",
        ),
        ([1, 1], [1, 1], [[1], [2]], 4, {"num_padded_reqs": 1}, "num_padded_reqs"),
        (
            [1],
            [1],
            [[1]],
            4,
            {"num_padded_tokens": 2.0},
            "num_padded_tokens must be an int",
        ),
        ([1], [1], [[1]], 4, {"num_padded_reqs": 2.0}, "num_padded_reqs must be an int"),
    ],
)
def test_from_lengths_refuses_and_writes_nothing(query, seq, table, block_size, keywords, message):
    out = MetadataBuffers.allocate(3, 8, 2, "cpu")
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions")
    for name in names:
        getattr(out, name).fill_(77)
    with pytest.raises(ValueError, match=message):
        CommonAttentionMetadata.from_lengths(query, seq, table, block_size, out=out, **keywords)
    assert all((getattr(out, name) == 77).all() for name in names)


def test_tables_as_lists_and_arrays():
    """Behind the tokens anything may stand."""
    for table in ([[5], [6, 7]], [[5, -7], [6, 7]], np.array([[5, 0], [6, 7]], dtype=np.int64)):
        common = CommonAttentionMetadata.from_lengths([1, 1], [1, 7], table, 4)
        assert common.slot_mapping.tolist() == [20, 30]
        assert common.block_table_tensor[1].tolist() == [6, 7]
    assert CommonAttentionMetadata.from_lengths([], [], [], 4).block_table_tensor.shape == (0, 0)


@pytest.mark.parametrize(
    "size", [(1, 8, 2, "cpu"), (3, 2, 2, "cpu"), (3, 8, 1, "cpu"), (3, 8, 2, "meta")]
)
def test_from_lengths_refuses_small_buffers_and_those_elsewhere(size):
    out = MetadataBuffers.allocate(*size)
    with pytest.raises(ValueError, match="out"):
        CommonAttentionMetadata.from_lengths([1, 2], [5, 2], int32([[1, 2], [3, 4]]), 4, out=out)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_buffers_refuse_negative_sizes(sizes):
    with pytest.raises(ValueError, match=r"num_reqs|num_tokens|max_blocks"):
        MetadataBuffers.allocate(*sizes, "cpu")


OPTIONAL_PER_REQUEST = {
    "seq_lens_cpu_upper_bound": torch.int32,
    "is_prefilling": torch.bool,
    "dcp_local_seq_lens": torch.int32,
}


def with_every_field(batch: Ragged) -> CommonAttentionMetadata:
    per_request = {
        name: torch.arange(batch.num_reqs).to(dtype) for name, dtype in OPTIONAL_PER_REQUEST.items()
    }
    encoder = np.arange(batch.num_reqs, dtype=np.int32) + 50
    changes = {**per_request, **batch.logits_fields(), "encoder_seq_lens": encoder}
    return batch.common(**changes, causal=False, max_logits_per_req=3)


@check(batches())
def test_unpadded(batch):
    common = with_every_field(batch)
    before = snapshot(common)
    num_reqs = batch.tape.below(batch.num_reqs + 1)
    num_tokens = batch.starts[num_reqs]
    if num_reqs == batch.num_reqs:
        num_tokens = batch.tape.pick([num_tokens, batch.num_rows])
    cut = common.unpadded(num_tokens, num_reqs)
    positions, slots = batch.positions_and_slots
    assert_fields(
        cut,
        query_start_loc=batch.starts[: num_reqs + 1],
        query_start_loc_cpu=batch.starts[: num_reqs + 1],
        seq_lens=batch.seq_lens[:num_reqs],
        seq_lens_cpu=batch.seq_lens[:num_reqs],
        num_computed_tokens_cpu=batch.computed[:num_reqs],
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=batch.table[:num_reqs],
        slot_mapping=slots[:num_tokens],
        positions=positions[:num_tokens],
        causal=False,
        seq_lens_cpu_upper_bound=list(range(num_reqs)),
        is_prefilling=[i > 0 for i in range(num_reqs)],
        dcp_local_seq_lens=list(range(num_reqs)),
        logits_indices_padded=batch.logits_rows + batch.garbage,
        num_logits_indices=len(batch.logits_rows),
        max_logits_per_req=3,
        block_size=batch.block_size,
    )
    assert cut.encoder_seq_lens.tolist() == [50 + i for i in range(num_reqs)]
    assert str(snapshot(common)) == str(before)


@pytest.mark.parametrize(("sizes", "name"), [((99, 1), "num_tokens"), ((1, 99), "num_reqs")])
def test_unpadded_refuses_more_than_there_is(common, sizes, name):
    with pytest.raises(ValueError, match=name):
        common.unpadded(*sizes)


@pytest.fixture
def common() -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths([1, 2], [5, 2], int32([[1, 2], [3, 4]]), 4)


def test_replace_copies_and_checks(common):
    other = common.replace(max_seq_len=100, causal=False)
    assert (other.max_seq_len, other.causal) == (100, False)
    assert (common.max_seq_len, common.causal) == (5, True)
    assert other.seq_lens is common.seq_lens
    with pytest.raises(ValueError, match="seq_lens"):
        common.replace(seq_lens=int32([1, 2, 3]))
    with pytest.raises(TypeError, match="no_such_field"):
        common.replace(no_such_field=1)


def test_batches_are_equal_by_identity(common):
    assert common == common
    assert common != common.replace()
    assert len({common, common.replace()}) == 2


FORMS = {
    "query_start_loc": int32([0, 1, 3]),
    "query_start_loc_cpu": int32([0, 1, 3]),
    "seq_lens": int32([5, 2]),
    "seq_lens_cpu": int32([5, 2]),
    "num_computed_tokens_cpu": int32([4, 0]),
    "block_table_tensor": int32([[1, 2], [3, 4]]),
    "slot_mapping": int64([8, 12, 13]),
    "positions": int64([4, 0, 1]),
    "logits_indices": int64([0, 2]),
    "logits_indices_padded": int64([0, 2, 9]),
    "logits_indices_cpu": int64([0, 2]),
    "num_logits": int32([2]),
    "seq_lens_cpu_upper_bound": int32([6, 2]),
    "dcp_local_seq_lens": int32([3, 1]),
    "is_prefilling": torch.tensor([False, True]),
}
PER_REQUEST = [
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu",
    "num_logits", "block_table_tensor", "seq_lens_cpu_upper_bound", "dcp_local_seq_lens",
    "is_prefilling",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form_is_checked(common, name):
    right = FORMS[name]
    assert getattr(common.replace(**{name: right}), name) is right
    others = [right.double(), right[None, None], right.unsqueeze(-1)]
    if name not in ("logits_indices_padded", "logits_indices_cpu"):  # of either kind
        others.append(right.int() if right.dtype == torch.int64 else right.long())
    for wrong in others:
        with pytest.raises(ValueError, match=f"^{name} must"):
            common.replace(**{name: wrong})
    if name in PER_REQUEST:
        with pytest.raises(ValueError, match=f"^{name} must"):
            common.replace(**{name: torch.cat([right, right[:1]])})


WINDOWS = {
    "window_block_table_tensor": int32([[1, 2], [3, 4]]),
    "window_slot_mapping": int64([8, 12, 13]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_of_windows_come_with_their_slots(common, name):
    split = common.replace(**WINDOWS)
    assert split.of_windows().slot_mapping is WINDOWS["window_slot_mapping"]
    with pytest.raises(ValueError, match="must both be given or both be None"):
        common.replace(**{name: WINDOWS[name]})
    for wrong in (WINDOWS[name].double(), WINDOWS[name][None, None]):
        with pytest.raises(ValueError, match=f"^{name} must"):
            split.replace(**{name: wrong})


def test_slots_of_windows_are_validated(common):
    common.replace(**WINDOWS).validate()
    for wrong in (int64([8, 12]), int64([8, -2, 13])):
        with pytest.raises(ValueError, match=r"^window_slot_mapping must"):
            common.replace(**WINDOWS | {"window_slot_mapping": wrong}).validate()


@pytest.mark.parametrize("name", [n for n in FORMS if n not in ("seq_lens", "is_prefilling")])
def test_device_is_checked(common, name):
    with pytest.raises(ValueError, match=f"^{name} must be on cpu, got meta"):
        common.replace(**{name: FORMS[name].to("meta")})


def test_the_device_is_that_of_seq_lens(common):
    with pytest.raises(ValueError, match=r"^query_start_loc must be on meta, got cpu"):
        common.replace(seq_lens=common.seq_lens.to("meta"))


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
def test_counts_are_ints(common, name):
    for value in (torch.tensor(2), 2.0, True):
        with pytest.raises(ValueError, match=f"^{name} must be an int"):
            common.replace(**{name: value})


def test_unknown_mirrors_are_none():
    common = CommonAttentionMetadata(
        int32([0, 1]), None, int32([3]), num_reqs=1, num_actual_tokens=1, max_query_len=1,
        max_seq_len=8, block_table_tensor=int32([[1]]), slot_mapping=int64([6]),
    )  # fmt: skip
    assert common.seq_lens_cpu is None
    assert common.num_computed_tokens_cpu is None
    assert common.num_computed_tokens.tolist() == [2]
    assert [f.name for f in dataclasses.fields(common)][:5] == [
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu",
        "num_computed_tokens_cpu",
    ]  # fmt: skip
