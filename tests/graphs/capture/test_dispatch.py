"""Which key a batch gets: tables for every mode, and what must hold for any sizes."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.capture.dispatch import CudagraphDispatcher
from graphs.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode
from graphs.sampling.params import Sampling

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

DECODE_SIZES, MIXED_SIZES, MAX_NUM_REQS, QUERY_LENS = [1, 2, 4], [4, 8, 16, 32], 6, [1, 3]


def dispatcher(mode: CUDAGraphMode) -> CudagraphDispatcher:
    return CudagraphDispatcher(mode, DECODE_SIZES, MIXED_SIZES, MAX_NUM_REQS, QUERY_LENS)


def uniform(num_reqs: int, query_len: int) -> BatchDescriptor:
    return BatchDescriptor(num_reqs * query_len, num_reqs, uniform=True)


def mixed(num_tokens: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens, {4: 4, 8: 7, 16: 7, 32: 7}[num_tokens])


UNIFORM_KEYS = [uniform(n, q) for n, q in itertools.product(DECODE_SIZES, QUERY_LENS)]
MIXED_KEYS = [mixed(num_tokens) for num_tokens in MIXED_SIZES]
KEYS = {
    # mode: keys that run whole, keys that run in pieces
    NONE: ([], []),
    PIECEWISE: ([], [*UNIFORM_KEYS, *MIXED_KEYS]),
    FULL: ([*UNIFORM_KEYS, *MIXED_KEYS], []),
    DECODE_ONLY: (UNIFORM_KEYS, []),
    BOTH: (UNIFORM_KEYS, MIXED_KEYS),
}


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_keys(mode):
    full, piecewise = KEYS[mode]
    made = dispatcher(mode)
    assert made.keys(FULL) == sorted(full, reverse=True)
    assert made.keys(PIECEWISE) == sorted(piecewise, reverse=True)
    assert made.keys(NONE) == []


def test_sizes_may_come_in_any_order_and_twice():
    shuffled = CudagraphDispatcher(FULL, [4, 1, 2, 1], [32, 4, 16, 8, 8], MAX_NUM_REQS, [3, 1, 3])
    assert shuffled.keys(FULL) == dispatcher(FULL).keys(FULL)
    assert shuffled.dispatch(3, 3, 1) == (FULL, uniform(4, 1))


def test_a_mixed_key_has_room_for_the_owner_of_padding_rows():
    keys = CudagraphDispatcher(FULL, [], [1, 2, 6, 7, 64], max_num_reqs=6).keys(FULL)
    assert [(k.num_tokens, k.num_reqs) for k in keys] == [(64, 7), (7, 7), (6, 6), (2, 2), (1, 1)]


BATCHES = {
    # (tokens, requests, query length): the uniform key that fits, the mixed one that fits
    (1, 1, 1): (uniform(1, 1), mixed(4)),
    (3, 3, 1): (uniform(4, 1), mixed(4)),
    (4, 4, 1): (uniform(4, 1), mixed(4)),
    (5, 5, 1): (None, mixed(8)),
    (3, 1, 3): (uniform(1, 3), mixed(4)),
    (9, 3, 3): (uniform(4, 3), mixed(16)),
    (15, 5, 3): (None, mixed(16)),
    (18, 6, 3): (None, mixed(32)),
    (2, 1, 2): (None, mixed(4)),  # uniform, of a length that has no keys
    (36, 6, 6): (None, None),
    (1, 1, None): (None, mixed(4)),
    (4, 4, None): (None, mixed(4)),  # no padding rows, none to own them
    (4, 1, None): (None, mixed(4)),
    (6, 6, None): (None, mixed(8)),
    (32, 6, None): (None, mixed(32)),
    (32, 1, None): (None, mixed(32)),
    (33, 1, None): (None, None),
}


def expected(mode: CUDAGraphMode, batch: tuple) -> tuple:
    """First the modes, then uniform before mixed."""
    found = zip((mode.decode_mode(), mode.mixed_mode()), BATCHES[batch], strict=True)
    found = [(m, key) for m, key in found if key is not None]
    for runtime_mode in (FULL, PIECEWISE):
        for m, key in found:
            if m is runtime_mode:
                return m, key
    return NONE, None


@pytest.mark.parametrize(("mode", "batch"), list(itertools.product(CUDAGraphMode, BATCHES)))
def test_every_mode_and_batch(mode, batch):
    assert dispatcher(mode).dispatch(*batch) == expected(mode, batch)


def test_query_lengths_may_have_modes_of_their_own():
    made = dispatcher(BOTH)
    made.initialize_keys({3: PIECEWISE})
    assert made.dispatch(2, 2, 1) == (FULL, uniform(2, 1))
    assert made.dispatch(6, 2, 3) == (PIECEWISE, uniform(2, 3))
    assert made.dispatch(15, 5, 3) == (PIECEWISE, mixed(16))
    assert {key.query_len for key in made.keys(FULL)} == {1}
    assert {key.query_len for key in made.keys(PIECEWISE)} == {3, None}


def test_a_whole_mixed_graph_comes_before_a_broken_uniform_one():
    made = dispatcher(FULL)
    made.initialize_keys({1: PIECEWISE, 3: NONE})
    assert made.dispatch(2, 2, 1) == (FULL, mixed(4))
    assert made.dispatch(6, 2, 3) == (FULL, mixed(8))
    made.initialize_keys({1: PIECEWISE}, mixed_mode=NONE)
    assert made.dispatch(2, 2, 1) == (PIECEWISE, uniform(2, 1))


def test_keys_are_made_anew():
    made = dispatcher(FULL)
    made.dispatch(1, 1, 1, Sampling.RANDOM)
    made.initialize_keys({1: NONE, 3: NONE}, NONE)
    assert [made.keys(mode) for mode in RUNTIME_MODES] == [[], [], []]
    made.initialize_keys()
    assert made.keys(FULL) == dispatcher(FULL).keys(FULL)


def test_keys_of_other_kinds_follow_when_they_are_asked_for():
    made = dispatcher(BOTH)
    before = made.keys(FULL), made.keys(PIECEWISE)
    assert {key.sampling for key in itertools.chain(*before)} == {Sampling.GREEDY}
    _, key = made.dispatch(3, 3, 1, Sampling.FILTERED)
    assert key == BatchDescriptor(4, 4, True, Sampling.FILTERED)
    made.dispatch(4, 4, 1, Sampling.FILTERED)
    assert set(made.keys(FULL)) == {*before[0], key}
    assert made.keys(PIECEWISE) == before[1]


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_steps_without_logits_have_keys_of_their_own(mode):
    """Of the same sizes; none comes back for a step that wants some."""
    for num_tokens, num_reqs, query_len in BATCHES:
        made = dispatcher(mode)
        wanted_mode, wanted = made.dispatch(num_tokens, num_reqs)
        found_mode, key = made.dispatch(num_tokens, num_reqs, logits=False)
        assert found_mode is wanted_mode
        assert key == (None if wanted is None else dataclasses.replace(wanted, logits=False))
        assert key is None or key in made.keys(mode.mixed_mode())
        assert made.dispatch(num_tokens, num_reqs) == (wanted_mode, wanted)
        if query_len is not None:
            with pytest.raises(ValueError, match=r"^logits must be True in a uniform batch, got F"):
                made.dispatch(num_tokens, num_reqs, query_len, logits=False)
        with pytest.raises(ValueError, match=r"^logits must be True or False, got 0"):
            made.dispatch(num_tokens, num_reqs, logits=0)  # pyright: ignore[reportArgumentType]


# -- what must hold for any sizes ------------------------------------------------------------------

runtime_modes = st.sampled_from(RUNTIME_MODES)
sizes = st.lists(st.integers(1, 80), max_size=6)


@st.composite
def dispatchers(draw):
    max_num_reqs = draw(st.integers(1, 24))
    decode_sizes = draw(st.lists(st.integers(1, max_num_reqs), max_size=5))
    query_lens = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    mode = draw(st.sampled_from(CUDAGraphMode))
    made = CudagraphDispatcher(mode, decode_sizes, draw(sizes), max_num_reqs, query_lens)
    if draw(st.booleans()):
        by_length = draw(st.dictionaries(st.sampled_from(query_lens), runtime_modes))
        made.initialize_keys(by_length, draw(runtime_modes))
    return made


@st.composite
def batches(draw):
    """Tokens, requests, query length."""
    num_reqs = draw(st.integers(1, 28))
    if draw(st.booleans()):
        query_len = draw(st.integers(1, 6))
        return num_reqs * query_len, num_reqs, query_len
    return num_reqs + draw(st.integers(0, 70)), num_reqs, None


def holds(key: BatchDescriptor, num_tokens: int, num_reqs: int, query_len: int | None) -> bool:
    """Whether the batch can be padded to the key, by making the padded batch."""
    rows, reqs = key.num_tokens - num_tokens, key.num_reqs - num_reqs
    if rows < 0 or reqs < 0:
        return False
    if not key.uniform:  # padding requests that are left over have no rows
        return reqs > 0 or rows == 0
    length = key.num_tokens // key.num_reqs
    return query_len == length and rows == reqs * length


@settings(deadline=None, max_examples=400)
@given(dispatchers(), batches(), st.sampled_from(Sampling))
def test_dispatch_for_any_sizes(made, batch, kind):
    all_keys = {mode: made.keys(mode) for mode in RUNTIME_MODES}
    mode, key = made.dispatch(*batch, kind)
    able = {m: [k for k in keys if holds(k, *batch)] for m, keys in all_keys.items()}
    for better in RUNTIME_MODES[: RUNTIME_MODES.index(mode)]:
        assert not able[better], "a better mode had a key"
    if key is None:
        assert mode is NONE
        return
    assert mode is not NONE
    assert holds(key, *batch), "the key fits"
    assert key.sampling is kind
    assert key in made.keys(mode)
    if batch[2] is None:
        assert not key.uniform, "a mixed batch never gets a uniform key"
    same = [k for k in able[mode] if k.uniform == key.uniform]
    assert (key.num_tokens, key.num_reqs) == min((k.num_tokens, k.num_reqs) for k in same)
    assert key.uniform or not any(k.uniform for k in able[mode]), "its own keys come first"


@settings(deadline=None)
@given(dispatchers())
def test_every_key_is_used_by_the_batch_of_its_size(made):
    """No key is captured in vain, but a broken uniform one that a whole mixed one replaces."""
    for mode in (FULL, PIECEWISE):
        for key in made.keys(mode):
            found_mode, found = made.dispatch(key.num_tokens, key.num_reqs, key.query_len)
            assert found == key or (found_mode is FULL and mode is PIECEWISE)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs must be at least 1, got 0"),
        ({"decode_sizes": [0]}, "decode_sizes must be from 1 to .*=6, got 0"),
        ({"decode_sizes": [1, 7]}, "decode_sizes must be from 1 to .*=6, got 7"),
        ({"mixed_sizes": [8, 0]}, "mixed_sizes must be at least 1, got 0"),
        ({"uniform_query_lens": [0]}, "uniform_query_lens must be at least 1"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    good = {"decode_sizes": [1], "mixed_sizes": [8], "max_num_reqs": 6, "uniform_query_lens": [1]}
    with pytest.raises(ValueError, match=f"^{message}"):
        CudagraphDispatcher(FULL, **good | arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((0, 0), "^num_reqs must be from 1 to num_tokens=0, got 0"),
        ((1, 0), "^num_reqs must be from 1 to num_tokens=1, got 0"),
        ((2, 3), "^num_reqs must be from 1 to num_tokens=2, got 3"),
        ((6, 3, 1), "^uniform_query_len must be num_tokens / num_reqs = 6 / 3, got 1"),
        ((7, 3, 2), "^uniform_query_len must be num_tokens / num_reqs = 7 / 3, got 2"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        dispatcher(FULL).dispatch(*batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({2: FULL},), r"^decode_modes must be of uniform_query_lens=\[1, 3\], got \[1, 2, 3\]"),
        (({1: BOTH},), "^runtime mode must be known, got FULL_AND_PIECEWISE; supported: FULL"),
        (({}, DECODE_ONLY), "^runtime mode must be known, got FULL_DECODE_ONLY; supported: FULL"),
    ],
)
def test_bad_modes_are_refused_and_the_keys_stay(arguments, message):
    made = dispatcher(BOTH)
    with pytest.raises(ValueError, match=message):
        made.initialize_keys(*arguments)
    assert made.keys(FULL) == sorted(UNIFORM_KEYS, reverse=True)
