"""`logits_rows` of the attention operators: reduced batches, and what they refuse.

T rows of the batch, R logits rows.
"""

import pytest
import torch

from attn_ops import AttentionSpec, attention, attention_with_lse, get_backend

SCALE = 0.3
NAMES = ["TORCH", "FLEX", "TRITON"]


def reduced(batch, rows, name="TORCH", count=None):
    """The batch's metadata anew, with logits rows."""
    indices = torch.tensor(rows, dtype=torch.int64)
    known = {"logits_indices_padded": indices, "num_logits_indices": count or len(rows)}
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
    meta = reduced(batch, [], name)
    out, lse = attention_with_lse(batch.q[:0], batch.kv_cache, meta, SCALE, logits_rows=True)
    assert (out.shape, lse.shape) == ((0, *batch.q.shape[1:]), (0, batch.q.shape[1]))
    got = attention(batch.q[:0], batch.kv_cache, meta, SCALE, logits_rows=True)
    assert (got.shape, got.dtype) == (out.shape, batch.q.dtype)
    assert not meta.has_logits_rows
    with pytest.raises(ValueError, match="logits rows must be those of the batch, 0 with padding"):
        attention(batch.q[:2], batch.kv_cache, meta, SCALE, logits_rows=True)


def test_metadata_is_reduced_once_and_only_where_it_must_be(make_batch):
    meta = reduced(make_batch([3, 2], [5, 2]), [2, 4])
    assert meta.logits_rows(2) is meta.logits_rows(2)
    common = meta.logits_rows(2).common
    assert common.query_start_loc.tolist() == [0, 1, 2]
    assert torch.equal(common.seq_lens, meta.common.seq_lens)
    for query in ([1, 1], [3, 2]):
        whole = reduced(make_batch(query, [5, 4]), range(sum(query)))
        assert whole.logits_rows(sum(query)) is whole


LAST = "must hold the last rows of each request, in order"
ALL = "must be the . rows of the batch in their order"


@pytest.mark.parametrize(
    ("query", "rows", "message"),
    [
        ([3, 2], [1, 4], LAST),
        ([3, 2], [4, 2], LAST),
        ([3, 2], [2, 3], LAST),
        ([3, 2], [0, 1, 2, 3], LAST),
        ([3, 2], [2, 5], "logits_indices_padded must hold rows from 0 to 4"),
        ([3, 2], None, "logits_indices_padded and num_logits_indices must be"),
        ([1, 1, 1], [0, 2], ALL),
        ([1, 1, 1], [2, 1, 0], ALL),
        ([2, 2], [1, 0, 3, 2], ALL),
    ],
)
def test_wrong_rows_are_refused(make_batch, query, rows, message):
    batch = make_batch(query, [5, 4, 3][: len(query)])
    meta = batch.meta if rows is None else reduced(batch, rows)
    q_RNH = batch.q[: len(rows or [0, 0])]
    with pytest.raises(ValueError, match=message):
        attention(q_RNH, batch.kv_cache, meta, SCALE, logits_rows=True)


def test_metadata_that_does_not_fit_is_refused(make_batch):
    meta = reduced(make_batch([3, 2], [5, 2]), [2, 4])
    with pytest.raises(ValueError, match="those of the batch, 2 with padding, got 1"):
        meta.logits_rows(1)
    with pytest.raises(ValueError, match=r"must come from build\(\) of backend TORCH's builder"):
        meta.replace(views=None).logits_rows(2)
