"""Captured steps with prompts are replayed where that is faster than calling them."""

import dataclasses

import pytest
import torch

from attn_ops import AttentionSpec, get_backend
from graphs.capture.gains import Gain
from graphs.capture.plan import CapturePlan
from graphs.modes import CUDAGraphMode, default_mixed_sizes
from tests.kit.sessions import captured, captured_lazily, uncaptured

PROMPTS = [[3], [5, 9], list(range(1, 18)), [1, 2, 3, 4], [7] * 9]


@pytest.mark.parametrize(
    ("replay", "calls", "least"),
    [
        (1.0, (2.0, 3.0), 65),  # launches are late whatever the size
        (2.0, (2.0, 2.0), 65),
        (2.5, (2.0, 3.0), 97),
        (3.0, (2.0, 3.0), 128),
        (3.1, (2.0, 3.0), None),  # padding costs more than launches
    ],
)
def test_the_least_step_that_gains(replay, calls, least):
    gain = Gain(128, 65, replay, *calls)
    assert gain.least == least
    assert ("never used" if least is None else f"from {least} tokens on") in str(gain)


def timed(session, *times):
    """The session's timer gives these, and runs what it is to time."""
    left = list(times)

    def timer(run):
        run()
        return left.pop(0)

    session.loop.gains.timer = timer
    return left


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(
    ("times", "called"),
    [((1.0, 2.0, 3.0, 1.0), False), ((4.0, 2.0, 3.0, 2.0), True)],
    ids=["gains", "loses"],
)
def test_steps_go_where_they_are_faster(model, mode, times, called):
    want = uncaptured(model).generate(PROMPTS, 6)
    session = captured_lazily(model, cudagraph_mode=mode, max_tokens_per_step=64)
    left = timed(session, *times * 9)
    assert session.generate(PROMPTS, 6) == want
    assert (session.num_steps["called"] > 0) == called
    assert len(left) < 36
    assert len(left) % 4 == 0
    report = session.report()
    assert report.mixed_gains
    assert ("never used" in report.mixed_gains[0]) == called
    assert "mixed steps" in str(report)
    session.loop.drop_graphs()
    assert not session.report().mixed_gains


def test_calls_that_find_no_memory(model):
    """A replay has its memory already."""
    want = uncaptured(model).generate(PROMPTS, 6)
    session = captured_lazily(model, cudagraph_mode="FULL", max_tokens_per_step=64)
    num_timed = 0

    def timer(run):
        nonlocal num_timed
        num_timed += 1
        if num_timed % 2 == 0:
            raise torch.OutOfMemoryError("no memory left")
        return 1.0

    session.loop.gains.timer = timer
    assert session.generate(PROMPTS, 6) == want
    assert session.num_steps["called"] == 0
    assert "find no memory; used from" in session.report().mixed_gains[0]


@pytest.mark.parametrize(
    ("times", "sizes"),
    [
        ([1.0] * 16, [16, 32, 64, 128]),
        # Smaller ones are not timed where launches take longer.
        ([3.0, 4.0, 5.0, 2.9, 2.0, 3.0, 4.0, 2.1], [64, 128]),
    ],
)
def test_every_size_is_timed_once_before_the_first_step(model, times, sizes):
    session = captured(model, cudagraph_mode="FULL", max_tokens_per_step=128)
    left = timed(session, *times)
    session.warm_up()
    assert not left
    gains = list(session.loop.gains)
    assert [gain.num_tokens for gain in gains] == sizes
    assert [gain.low for gain in gains] == [1, 17, 33, 65][-len(sizes) :]
    assert session.generate(PROMPTS, 6) == uncaptured(model).generate(PROMPTS, 6)
    assert session.num_steps["called"] == 0
    session.generate(PROMPTS, 6, temperature=0.5)  # other graphs, the same sizes


def test_nothing_is_timed_on_a_cpu_nor_where_sizes_are_asked_for(model):
    session = captured(model, cudagraph_mode="FULL", max_tokens_per_step=16)
    session.generate(PROMPTS, 3)
    assert session.loop.gains.timer is None
    assert session.report().mixed_gains == []
    assert "mixed steps" not in str(session.report())
    assert not session.plan.chooses_mixed  # in debugging everything is as in a capture
    assert uncaptured(model).plan.chooses_mixed
    assert not uncaptured(model, mixed_capture_sizes=[8]).plan.chooses_mixed


def test_default_sizes():
    assert default_mixed_sizes(10) == [10]
    assert default_mixed_sizes(64) == [16, 32, 64]
    assert default_mixed_sizes(400) == [16, 32, 64, 128, 192, 256, 320, 384, 400]
    assert default_mixed_sizes(8192)[-5:] == [768, 896, 1024, 2048, 8192]


def test_by_default_short_prompts_are_captured_where_the_backend_can(model):
    short, long = (captured(model, max_tokens_per_step=n).plan for n in (256, 4096))
    assert short.used is long.used is CUDAGraphMode.FULL
    assert short.dispatcher.mixed_sizes == default_mixed_sizes(256)
    assert long.dispatcher.mixed_sizes == default_mixed_sizes(2048)
    asked = captured(model, max_tokens_per_step=4096, cudagraph_mode="FULL").plan
    assert asked.dispatcher.mixed_sizes == default_mixed_sizes(4096)
    options = dataclasses.replace(long.options, debug=None)
    cuda, geometry = torch.device("cuda"), [AttentionSpec(4, 2, 16, torch.float32)]
    for name, mode in {
        "TRITON": CUDAGraphMode.FULL,
        "FLASHINFER": CUDAGraphMode.FULL_DECODE_ONLY,
        "FLEX": CUDAGraphMode.FULL_DECODE_ONLY,
    }.items():
        plan = CapturePlan.of(options, get_backend(name), geometry, cuda, None)
        assert plan.asked is mode, name
    plan = CapturePlan.of(options, get_backend("TRITON"), geometry, cuda, None, split=True)
    assert plan.asked is CUDAGraphMode.FULL_DECODE_ONLY
