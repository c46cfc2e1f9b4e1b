"""Graph modes by name and by their parts, keys of graphs, capture sizes."""

import dataclasses
import itertools

import pytest

from graphs.modes import (
    RUNTIME_MODES,
    BatchDescriptor,
    CUDAGraphMode,
    checked_capture_sizes,
    default_capture_sizes,
)
from graphs.sampling.params import Sampling

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE

PARTS = {
    # mode: decode, mixed, has its own routine for decode batches
    NONE: (NONE, NONE, False),
    PIECEWISE: (PIECEWISE, PIECEWISE, False),
    FULL: (FULL, FULL, False),
    DECODE_ONLY: (FULL, NONE, True),
    BOTH: (FULL, PIECEWISE, True),
}


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_parts(mode):
    decode, mixed, separate = PARTS[mode]
    assert (mode.decode_mode(), mode.mixed_mode()) == (decode, mixed)
    assert mode.separate_routine() is separate
    assert {m for m in CUDAGraphMode if mode.has_mode(m)} == {decode, mixed}
    assert CUDAGraphMode.of(decode, mixed) is mode


@pytest.mark.parametrize(("decode", "mixed"), list(itertools.product(RUNTIME_MODES, repeat=2)))
def test_a_mode_of_two_parts_has_the_decode_part(decode, mixed):
    assert CUDAGraphMode.of(decode, mixed).decode_mode() is decode


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_parse(mode):
    assert CUDAGraphMode.parse(mode) is mode
    assert CUDAGraphMode.parse(mode.name) is mode
    assert CUDAGraphMode.parse(mode.name.lower()) is mode


@pytest.mark.parametrize("mode", ["all", "", 1, "CUDAGraphMode.FULL"])
def test_parse_refuses(mode):
    with pytest.raises(ValueError, match=r"^cudagraph_mode must be known, got .*NONE, PIECE"):
        CUDAGraphMode.parse(mode)


def test_every_field_tells_keys_apart():
    key = BatchDescriptor(8, 4, uniform=True)
    others = [
        BatchDescriptor(12, 4, uniform=True),
        BatchDescriptor(8, 2, uniform=True),
        BatchDescriptor(8, 4),
        *(BatchDescriptor(8, 4, True, kind) for kind in list(Sampling)[1:]),
        BatchDescriptor(8, 4, logits=False),
        BatchDescriptor(8, 4, logprobs=0),
        BatchDescriptor(8, 4, edits=0),
        BatchDescriptor(8, 8, uniform=True),
        BatchDescriptor(8, 8, uniform=True, groups=2),
        BatchDescriptor(8, 8, uniform=True, edits=0, late_edits=True),
    ]
    assert len(dataclasses.fields(key)) == 9  # one more needs a line above
    assert len({key, *others}) == len(others) + 1
    assert key == BatchDescriptor(8, 4, True, Sampling.GREEDY)
    assert hash(key) == hash(BatchDescriptor(8, 4, True, Sampling.GREEDY))


def test_keys_are_frozen_and_ordered_by_tokens():
    small, large = BatchDescriptor(8, 8, True, Sampling.PENALIZED), BatchDescriptor(9, 1)
    assert small < large
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.num_tokens = 9  # type: ignore


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0), "^num_reqs must be from 1 to num_tokens=4, got 0"),
        ((4, 5), "^num_reqs must be from 1 to num_tokens=4, got 5"),
        ((9, 4, True), "^num_tokens of a uniform batch must be a multiple of num_reqs=4, got 9"),
        ((8, 4, True, Sampling.GREEDY, False), "^logits must be True in a uniform batch, got"),
        ((8, 4, False, Sampling.GREEDY, "no"), "^logits must be True or False, got 'no'"),
    ],
)
def test_impossible_keys_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchDescriptor(*arguments)


def test_sampling_kinds_are_ordered():
    assert list(Sampling) == sorted(Sampling)
    kinds = [Sampling.RANDOM, Sampling.GREEDY, Sampling.PENALIZED, Sampling.FILTERED]
    assert max(kinds) is Sampling.PENALIZED
    assert max(kinds[:2]) is Sampling.RANDOM


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (257, [1, 2, 4, *range(8, 257, 8), 257]),
        (512, [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]),
    ],
)
def test_default_capture_sizes(largest, sizes):
    assert default_capture_sizes(largest) == sizes
    assert checked_capture_sizes(None, largest) == sizes


@pytest.mark.parametrize(
    ("sizes", "checked"), [([], []), ([4, 1, 4], [1, 4]), (range(1, 4), [1, 2, 3])]
)
def test_checked_capture_sizes(sizes, checked):
    assert checked_capture_sizes(sizes, 4) == checked


@pytest.mark.parametrize("bad", [0, -1, 5])
def test_a_size_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=f"^capture_sizes must be from 1 to .*=4, got {bad}"):
        checked_capture_sizes([1, bad], 4)
