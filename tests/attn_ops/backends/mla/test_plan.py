"""The chunk plan: every key once for its rows, within the workspace, in few chunks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops.backends.mla import plan
from attn_ops.backends.mla.plan import (
    Rows,
    packed_chunks,
    plan_prefill,
    takes_decode_way,
    workspace_tokens,
)

PAGE = 4


def rows_of(lengths: list[tuple[int, int]]) -> list[Rows]:
    """Of pairs of query length and context."""
    first, found = 0, []
    for request, (query, context) in enumerate(lengths):
        found.append(Rows(request, first, query, context + query))
        first += query
    return found


LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 90)), min_size=1, max_size=7)


def num_equal_shares(contexts: list[int], num_tokens: int) -> int:
    """Chunks by the rule of vLLM: each request with a context has an equal share of each."""
    share = num_tokens // max(1, sum(n > 0 for n in contexts)) // PAGE * PAGE
    return -(-max(contexts) // share)


@settings(deadline=None)
@given(LENGTHS, st.integers(7 * PAGE, 120))
def test_packed_chunks_are_as_few_as_there_can_be(lengths, num_tokens):
    rows = rows_of(lengths)
    chunks = packed_chunks(rows, num_tokens, PAGE)
    seen: dict[int, list[int]] = {r.request: [] for r in rows}
    for chunk in chunks:
        assert 0 < chunk.num_keys <= num_tokens
        for keys in chunk.keys:
            assert keys.start % PAGE == 0
            seen[keys.rows.request] += range(keys.start, keys.start + keys.count)
    assert all(seen[r.request] == list(range(r.context)) for r in rows)
    total = sum(r.context for r in rows)
    assert len(chunks) <= -(-total // (num_tokens - PAGE + 1))
    assert len(chunks) <= num_equal_shares([r.context for r in rows], num_tokens)


@settings(deadline=None)
@given(LENGTHS, st.integers(PAGE, 120))
def test_each_row_sees_each_of_its_keys_once(lengths, num_tokens):
    rows = rows_of(lengths)
    planned = plan_prefill(rows, num_tokens, PAGE)
    seen: dict[int, list[int]] = {i: [] for i in range(sum(query for query, _ in lengths))}
    for chunk in planned.chunks:
        assert 0 < chunk.num_keys <= num_tokens
        assert chunk.max_keys == max(chunk.cu_keys[i + 1] - chunk.cu_keys[i]
                                     for i in range(len(chunk.keys)))  # fmt: skip
        places = [planned.rows.index(k.rows) for k in chunk.keys]
        assert places == list(range(places[0], places[0] + len(places)))
        for keys in chunk.keys:
            r = keys.rows
            for i in range(r.count):
                last = r.context + i + 1 if chunk.causal else keys.start + keys.count
                seen[r.first + i] += range(keys.start, last)
    for r in rows:
        for i in range(r.count):
            assert sorted(seen[r.first + i]) == list(range(r.context + i + 1))
    taken = sorted(i for r in planned.rows for i in range(r.first, r.first + r.count))
    assert taken == list(range(len(seen)))
    kinds = [chunk.causal for chunk in planned.chunks]
    assert kinds == sorted(kinds, reverse=True)


def test_no_more_calls_than_the_reference():
    """There all new rows are one causal call, and the context follows in equal shares."""
    rng = random.Random(0)
    for _ in range(2000):
        num_tokens = rng.randint(7 * PAGE, 500)
        lengths = [
            (rng.randint(1, num_tokens // 7), rng.choice([0, rng.randint(1, 3 * num_tokens)]))
            for _ in range(rng.randint(1, 7))
        ]
        contexts = [context for _, context in lengths]
        want = 1 + num_equal_shares(contexts, num_tokens)
        chunks = plan_prefill(rows_of(lengths), num_tokens, PAGE).chunks
        assert len(chunks) <= want, (lengths, num_tokens)


def test_what_fits_beside_new_rows_of_a_longer_request_is_in_their_call():
    planned = plan_prefill(rows_of([(11, 1290), (16, 0)]), 464, 16)
    found = [(c.causal, c.num_keys) for c in planned.chunks]
    assert found == [(True, 27), (False, 464), (False, 464), (False, 362)]
    assert [r.request for r in planned.rows] == [1, 0]


def test_what_fits_takes_one_chunk_and_no_merging():
    planned = plan_prefill(rows_of([(10, 50), (20, 0), (3, 7)]), 90, PAGE)
    assert [(c.causal, c.num_keys) for c in planned.chunks] == [(True, 90)]
    assert [r.request for r in planned.rows] == [0, 1, 2]


def test_longest_first_where_that_saves_a_chunk():
    lengths = [(5, 35), (5, 35), (10, 50), (10, 50)]  # 40, 40, 60, 60
    planned = plan_prefill(rows_of(lengths), 100, PAGE)
    assert [c.num_keys for c in planned.chunks] == [100, 100]
    assert [r.request for r in planned.rows] == [2, 0, 3, 1]


def test_a_long_context_is_chunked_behind_its_new_keys():
    planned = plan_prefill(rows_of([(6, 94)]), 40, PAGE)
    found = [(c.causal, c.num_keys) for c in planned.chunks]
    assert found == [(True, 6), (False, 40), (False, 40), (False, 14)]


def test_a_page_must_fit():
    with pytest.raises(ValueError, match="num_tokens must be at least a page of 4 tokens, got 3"):
        plan_prefill(rows_of([(1, 5)]), 3, PAGE)


@pytest.mark.parametrize(
    ("model_len", "num_seqs", "want"),
    [(1024, 16, 8192), (16, 1024, 65536), (163840, 16, 131072), (16, 16384, 131072)],
)
def test_size_rule(model_len, num_seqs, want):
    assert workspace_tokens(model_len, num_seqs, 16) == want


def test_which_way():
    short, long = plan.SHORT_QUERY_LEN, plan.LONG_CONTEXT_QUERY_LEN
    assert takes_decode_way(1, 1)
    assert takes_decode_way(short, short)
    assert takes_decode_way(5 * short, 0), "a request without keys has nothing to up-project"
    assert not takes_decode_way(short + 1, short + 1), "without a context the prefill way is less"
    assert not takes_decode_way(long, 10 * long)
    assert takes_decode_way(long // 2, 100 * long)
    assert not takes_decode_way(long + 1, 10**6)
