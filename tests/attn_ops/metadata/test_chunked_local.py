"""Chunked local attention: the virtual batches attend, for every token, the keys of its chunk."""

from typing import Any

import pytest
import torch

from attn_ops.metadata import (
    CommonAttentionMetadata,
    MetadataBuffers,
    make_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
)
from tests.attn_ops.metadata import brute_force
from tests.attn_ops.metadata.ragged import (
    Ragged,
    assert_fields,
    assert_is_view,
    batches,
    check,
    int32,
    snapshot,
)


def read_chunk(batch: Ragged) -> int:
    return batch.block_size * (1 + batch.tape.below(4))


def expected_of(batch: Ragged, chunk: int) -> dict[str, Any]:
    virtual = brute_force.virtual_batches(
        batch.query_lens, batch.seq_lens, batch.table, chunk, batch.block_size
    )
    query_lens = [query for query, _, _ in virtual]
    starts, keys = brute_force.starts(query_lens), [keys for _, keys, _ in virtual]
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": keys,
        "seq_lens_cpu": keys,
        "num_computed_tokens_cpu": [k - q for q, k, _ in virtual],
        "num_reqs": len(virtual),
        "num_actual_tokens": batch.num_tokens,
        "max_query_len": max([0, *query_lens]),
        "max_seq_len": max([0, *keys]),
        "slot_mapping": batch.positions_and_slots[1],
        "block_table_tensor": [blocks for _, _, blocks in virtual],
        "causal": True,
    }


@check(batches())
def test_host(batch):
    chunk = read_chunk(batch)
    common = batch.common(causal=bool(batch.tape.below(2)))
    before = snapshot(common)
    block_size = batch.tape.pick([0, batch.block_size])
    if block_size:
        common.block_size = before["block_size"] = None  # the argument says it
    got = make_local_attention_virtual_batches(chunk, common, block_size)
    assert_fields(got, **expected_of(batch, chunk))
    assert snapshot(common) == before


@check(batches())
def test_every_token_attends_its_chunk(batch):
    """Causal attention over the virtual batches, slot by slot."""
    chunk = read_chunk(batch)
    got = make_local_attention_virtual_batches(
        chunk, batch.common(), on_device=bool(batch.tape.below(2))
    )
    keys = brute_force.causal_key_slots(
        got.query_lens.tolist(),
        got.seq_lens.tolist(),
        got.block_table_tensor.tolist(),
        batch.block_size,
    )
    assert keys == brute_force.chunk_key_slots(
        batch.query_lens, batch.seq_lens, batch.table, chunk, batch.block_size
    )


@check(batches())
def test_device(batch):
    """The host's virtual batches in front, empty ones behind, and nothing read of the mirrors."""
    chunk = read_chunk(batch)
    common = batch.common(query_start_loc_cpu=None, seq_lens_cpu=None, num_computed_tokens_cpu=None)
    before = snapshot(common)
    bound = max_local_attention_virtual_batches(
        chunk, batch.num_reqs, batch.num_rows, common.max_query_len
    )
    room = batch.tape.pick([None, bound, bound + 3])
    got = make_local_attention_virtual_batches(
        chunk, common, on_device=True, max_virtual_batches=room
    )
    expected = expected_of(batch, chunk)
    count, total = expected["num_reqs"], bound if room is None else room
    assert count <= bound
    surplus = total - count
    assert_fields(
        got,
        query_start_loc=expected["query_start_loc"] + [batch.num_tokens] * surplus,
        seq_lens=expected["seq_lens"] + [0] * surplus,
        block_table_tensor=expected["block_table_tensor"]
        + [[0] * (chunk // batch.block_size)] * surplus,
        query_start_loc_cpu=None,
        seq_lens_cpu=None,
        num_computed_tokens_cpu=None,
        num_reqs=total,
        num_actual_tokens=batch.num_tokens,
        max_query_len=min(common.max_query_len, chunk),
        max_seq_len=min(common.max_seq_len, chunk),
        slot_mapping=expected["slot_mapping"],
        causal=True,
    )
    assert snapshot(common) == before


@check(batches())
def test_out(batch):
    """Results lie in the caller's buffers, also the second time."""
    chunk, on_device = read_chunk(batch), bool(batch.tape.below(2))
    common, pages = batch.common(), chunk // batch.block_size
    room = max_local_attention_virtual_batches(
        chunk, batch.num_reqs, batch.num_rows, common.max_query_len
    )
    out = MetadataBuffers.allocate(room + batch.tape.below(2), batch.num_rows, pages, "cpu")
    for name in ("query_start_loc", "seq_lens", "block_table"):
        getattr(out, name).fill_(77)
    got = make_local_attention_virtual_batches(chunk, common, on_device=on_device, out=out)
    expected = expected_of(batch, chunk)
    count = expected["num_reqs"]
    assert got.query_start_loc[: count + 1].tolist() == expected["query_start_loc"]
    assert got.seq_lens[:count].tolist() == expected["seq_lens"]
    assert got.block_table_tensor[:count].tolist() == expected["block_table_tensor"]
    assert got.query_start_loc[count:].tolist() == [batch.num_tokens] * (got.num_reqs - count + 1)
    assert not got.seq_lens[count:].any()
    assert_is_view(got.query_start_loc, out.query_start_loc)
    assert_is_view(got.seq_lens, out.seq_lens)
    assert_is_view(got.block_table_tensor, out.block_table)


def worked_example() -> CommonAttentionMetadata:
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    return CommonAttentionMetadata.from_lengths([4, 10, 5], [6, 17, 9], table, 2)


def test_worked_example_by_the_oracle():
    """The oracle follows from the definition; here it meets the reference's numbers."""
    table = torch.arange(30).view(3, 10).tolist()
    virtual = brute_force.virtual_batches([4, 10, 5], [6, 17, 9], table, 4, 2)
    assert [query for query, _, _ in virtual] == [2, 2, 1, 4, 4, 1, 4, 1]
    assert [keys for _, keys, _ in virtual] == [4, 2, 4, 4, 4, 1, 4, 1]
    assert [blocks[0] for _, _, blocks in virtual] == [0, 2, 12, 14, 16, 18, 22, 24]
    assert all(second == first + 1 for _, _, (first, second) in virtual)


@pytest.mark.parametrize("on_device", [False, True])
def test_padding_requests_of_a_captured_step_give_one_virtual_batch(on_device):
    """They have one row and nothing in the cache; a bound of one a request must hold for them."""
    common = CommonAttentionMetadata.from_lengths(
        [1, 1, 1], [1, 9, 1], int32([[0, 0, 0], [4, 5, 6], [0, 0, 0]]), 4
    )
    lens = int32([0, 9, 0])
    common = common.replace(seq_lens=lens, seq_lens_cpu=lens.clone(), num_computed_tokens_cpu=None)
    got = make_local_attention_virtual_batches(4, common, on_device=on_device)
    assert got.num_reqs == 3
    assert got.query_start_loc.tolist() == [0, 1, 2, 3]
    assert got.seq_lens.tolist() == [0, 1, 0]
    assert got.block_table_tensor[1].tolist() == [6]


def test_device_reads_nothing():
    """Tensors on the meta device have no values: reading one raises."""
    common = CommonAttentionMetadata.from_lengths(
        [4, 10], [6, 17], torch.ones(2, 10, dtype=torch.int32), 2, device="meta"
    ).replace(query_start_loc_cpu=None, seq_lens_cpu=None, num_computed_tokens_cpu=None)
    got = make_local_attention_virtual_batches(4, common, on_device=True)
    bound = max_local_attention_virtual_batches(4, 2, 14, 10)
    assert got.num_reqs == bound == got.seq_lens.shape[0]


def test_mirrors_stand_alone():
    got = make_local_attention_virtual_batches(4, worked_example())
    got.query_start_loc.add_(1)
    got.seq_lens.add_(1)
    assert torch.equal(got.query_start_loc_cpu, got.query_start_loc - 1)
    assert torch.equal(got.seq_lens_cpu, got.seq_lens - 1)


@check(batches(max_reqs=4))
def test_bound_on_their_number(batch):
    """Never below the worst batch of these sizes, never above one a token and one a request."""
    chunk, num_reqs = 1 + batch.tape.below(9), batch.num_reqs
    num_tokens = min(batch.num_tokens, 16)
    longest = batch.tape.pick([None, 1, 2, 5, 16])
    bound = max_local_attention_virtual_batches(chunk, num_reqs, num_tokens, longest)
    assert type(bound) is int
    assert bound >= brute_force.most_virtual_batches(chunk, num_reqs, num_tokens, longest)
    assert bound <= num_reqs + num_tokens
    if longest == 1:
        assert bound == num_reqs, "a decode step"


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("chunk", "block_size", "changes", "name"),
    [
        (5, 2, {}, "attn_chunk_size"),
        (1, 2, {}, "attn_chunk_size"),
        (0, 2, {}, "attn_chunk_size"),
        (-4, 2, {}, "attn_chunk_size"),
        (4, 0, {"block_size": None}, "block_size"),
        (4, -2, {}, "block_size"),
        (2**31, 2, {}, "attn_chunk_size must be a multiple"),
    ],
)
def test_sizes_that_do_not_fit(chunk, block_size, changes, name, on_device):
    common = worked_example().replace(**changes)
    with pytest.raises(ValueError, match=name):
        make_local_attention_virtual_batches(chunk, common, block_size, on_device=on_device)


@pytest.mark.parametrize("name", ["query_start_loc_cpu", "seq_lens_cpu"])
def test_the_host_needs_the_mirrors(name):
    with pytest.raises(ValueError, match=name):
        make_local_attention_virtual_batches(4, worked_example().replace(**{name: None}))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("size", [(7, 19, 2), (40, 19, 1)])
def test_buffers_that_are_too_small(size, on_device):
    out = MetadataBuffers.allocate(*size, "cpu")
    for tensor in (out.query_start_loc, out.seq_lens, out.block_table):
        tensor.fill_(77)
    with pytest.raises(ValueError, match="out"):
        make_local_attention_virtual_batches(4, worked_example(), on_device=on_device, out=out)
    for tensor in (out.query_start_loc, out.seq_lens, out.block_table):
        assert (tensor == 77).all()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_table_without_columns_gives_null_blocks(on_device):
    table = torch.empty(2, 0, dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths([0, 0], [0, 0], table, 2)
    got = make_local_attention_virtual_batches(4, common, on_device=on_device)
    assert got.block_table_tensor.tolist() == [[0, 0], [0, 0]]
    assert (got.seq_lens.tolist(), got.query_start_loc.tolist()) == ([0, 0], [0, 0, 0])


def test_bounds_that_do_not_fit():
    with pytest.raises(ValueError, match="num_reqs must be at least 0"):
        max_local_attention_virtual_batches(4, -1, 5)
    for room, on_device, message in ((9, False, "must be None"), (7, True, "must be at least")):
        with pytest.raises(ValueError, match=f"max_virtual_batches {message}"):
            make_local_attention_virtual_batches(
                4, worked_example(), on_device=on_device, max_virtual_batches=room
            )
