"""`logits_rows` of the attention operators: reduced batches, and what they refuse.

T rows of the batch, R logits rows.
"""

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_with_lse, get_backend

SCALE = 0.3
NAMES = ["TORCH", "FLEX", "TRITON"]


def reduced(batch, rows, name="TORCH", count=None, **fields):
    """The batch's metadata anew, with logits rows."""
    indices = torch.tensor(rows)
    known = {"logits_indices_padded": indices, "num_logits_indices": count or len(rows)} | fields
    return build(batch, name, batch.common.replace(**known))


def build(batch, name, common):
    backend = get_backend(name)
    _, _, block_size, num_kv_heads, head_size = batch.kv_cache.shape
    spec = AttentionSpec(batch.q.shape[1], num_kv_heads, head_size, batch.q.dtype)
    return backend.builder(backend, [spec], block_size, "cpu").build(0, common)


STEPS = [
    ([3, 1, 5], [7, 4, 5], [2, 3, 8]),
    ([3, 1, 5], [7, 4, 5], [1, 2, 3, 7, 8]),
    ([3, 1, 5], [7, 4, 5], [8]),
    ([4], [4], [3]),
    ([4], [9], [0, 1, 2, 3]),
    ([1, 1, 1], [5, 1, 3], [0, 1, 2]),
    ([0, 6, 1], [0, 6, 2], [4, 5, 6]),
]


@pytest.mark.parametrize(("query", "seq_lens", "rows"), STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_whole_batch(make_batch, name, query, seq_lens, rows):
    batch = make_batch(query, seq_lens, head_size=16, block_size=16)
    meta = reduced(batch, rows, name)
    whole, lse = attention_with_lse(batch.q, batch.kv_cache, meta, SCALE)
    q_RNH = batch.q[rows]
    got = attention(q_RNH, batch.kv_cache, meta, SCALE, logits_rows=True)
    torch.testing.assert_close(got, whole[rows], atol=1e-6, rtol=1e-5)
    window = {"sliding_window": 3, "logits_rows": True}
    got = attention(q_RNH, batch.kv_cache, meta, SCALE, **window)
    wanted = attention(batch.q, batch.kv_cache, meta, SCALE, sliding_window=3)
    torch.testing.assert_close(got, wanted[rows], atol=1e-6, rtol=1e-5)
    out, few = attention_with_lse(q_RNH, batch.kv_cache, meta, SCALE, logits_rows=True)
    torch.testing.assert_close(out, whole[rows], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(few, lse[rows], atol=1e-6, rtol=1e-5)


def test_padded_rows_are_zero(make_batch):
    batch = make_batch([3, 2], [5, 2], num_padding_rows=2)
    meta = reduced(batch, [2, 4, 0, 0], count=2)
    q_RNH = batch.q[[2, 4, 0, 0]]
    got = attention(q_RNH, batch.kv_cache, meta, SCALE, logits_rows=True)
    wanted = attention(batch.q, batch.kv_cache, meta, SCALE)[[2, 4]]
    torch.testing.assert_close(got[:2], wanted)
    assert not got[2:].any()


def test_logits_indices_stand_in_for_the_padded_ones(make_batch):
    batch = make_batch([3, 2], [5, 2])
    rows = torch.tensor([2, 4])
    meta = build(batch, "TORCH", batch.common.replace(logits_indices=rows))
    got = attention(batch.q[rows], batch.kv_cache, meta, SCALE, logits_rows=True)
    torch.testing.assert_close(got, attention(batch.q, batch.kv_cache, meta, SCALE)[rows])


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_of_a_batch_that_wants_none(make_batch, name):
    """Nothing is reduced or launched; a model that sees rows although none are wanted is wrong."""
    batch = make_batch([3, 2], [5, 2], head_size=16, block_size=16)
    none = torch.empty(0, dtype=torch.int64)
    more = {"logits_indices_padded": none, "num_logits_indices": 0}
    meta = build(batch, name, batch.common.replace(**more))
    out, lse = attention_with_lse(batch.q[:0], batch.kv_cache, meta, SCALE, logits_rows=True)
    assert (out.shape, lse.shape) == ((0, *batch.q.shape[1:]), (0, batch.q.shape[1]))
    got = attention(batch.q[:0], batch.kv_cache, meta, SCALE, logits_rows=True)
    assert (got.shape, got.dtype) == (out.shape, batch.q.dtype)
    assert not meta.has_logits_rows
    with pytest.raises(ValueError, match="logits rows must be those of the batch, 0 with padding"):
        attention(batch.q[:2], batch.kv_cache, meta, SCALE, logits_rows=True)


def test_metadata_is_reduced_once(make_batch):
    meta = reduced(make_batch([3, 2], [5, 2]), [2, 4])
    assert meta.logits_rows(2) is meta.logits_rows(2)
    common = meta.logits_rows(2).common
    assert common.query_start_loc.tolist() == [0, 1, 2]
    assert torch.equal(common.seq_lens, meta.common.seq_lens)


@pytest.mark.parametrize(("query", "rows"), [([1, 1], [0, 1]), ([3, 2], [0, 1, 2, 3, 4])])
def test_nothing_is_reduced_where_all_rows_are_wanted(make_batch, query, rows):
    meta = reduced(make_batch(query, [5, 4]), rows)
    assert meta.logits_rows(len(rows)) is meta


def test_on_the_device_the_bound_is_used(make_batch):
    """Where replays change the rows, the host knows only how many there are at most."""
    batch = make_batch([3, 2], [5, 2], head_size=16, block_size=16)
    count = torch.tensor([2], dtype=torch.int32)
    fields = {"num_logits": count, "max_logits_per_req": 1, "query_start_loc_cpu": None,
              "seq_lens_cpu": None, "num_computed_tokens_cpu": None}  # fmt: skip
    indices = torch.tensor([2, 4, 0])
    common = batch.common.replace(logits_indices_padded=indices, num_logits_indices=3, **fields)
    meta = build(batch, "TRITON", common)
    few = meta.logits_rows(3).common
    assert (few.max_query_len, few.query_start_loc_cpu) == (1, None)
    assert few.query_start_loc.tolist() == [0, 1, 2]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[1, 4], [4, 2], [2, 3], [0, 1, 2, 3]])
def test_rows_must_be_the_last_of_their_requests(make_batch, rows):
    batch = make_batch([3, 2], [5, 2])
    meta = reduced(batch, rows)
    with pytest.raises(ValueError, match="must hold the last rows of each request, in order"):
        attention(batch.q[rows], batch.kv_cache, meta, SCALE, logits_rows=True)


def test_rows_must_be_rows_of_the_batch(make_batch):
    batch = make_batch([3, 2], [5, 2])
    with pytest.raises(ValueError, match="logits_indices_padded must hold rows from 0 to 4"):
        reduced(batch, [2, 5]).logits_rows(2)


def test_rows_must_be_given(make_batch):
    batch = make_batch([3, 2], [5, 2])
    with pytest.raises(ValueError, match="logits_indices_padded and num_logits_indices must be"):
        attention(batch.q[:2], batch.kv_cache, batch.meta, SCALE, logits_rows=True)


def test_metadata_must_know_how(make_batch):
    meta = reduced(make_batch([3, 2], [5, 2]), [2, 4]).replace(views=None)
    with pytest.raises(ValueError, match=r"must come from build\(\) of backend TORCH's builder"):
        meta.logits_rows(2)


def test_as_many_queries_as_logits_rows(make_batch):
    batch = make_batch([3, 2], [5, 2])
    meta = reduced(batch, [2, 4])
    with pytest.raises(ValueError, match="those of the batch, 2 with padding, got 1"):
        attention(batch.q[:1], batch.kv_cache, meta, SCALE, logits_rows=True)


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        pytest.param([1, 1, 1], [0, 2], id="some of a decode"),
        pytest.param([1, 1, 1], [2, 1, 0], id="a decode turned round"),
        pytest.param([2, 2], [1, 0, 3, 2], id="all, out of order"),
    ],
)
def test_unreduced_batches_are_checked_too(make_batch, query, rows):
    """Either the right rows or an error."""
    batch = make_batch(query, [5, 4, 3][: len(query)])
    meta = reduced(batch, rows)
    wanted = attention(batch.q, batch.kv_cache, meta, SCALE)[rows]
    try:
        got = attention(batch.q[rows], batch.kv_cache, meta, SCALE, logits_rows=True)
    except ValueError:
        return
    torch.testing.assert_close(got, wanted)
