"""What `benchmarks.fast_prefill` counts, against sums by hand."""

import argparse
import math
import random

import pytest

from benchmarks import fast_prefill
from benchmarks.fast_prefill import (
    Case,
    Side,
    all_bars,
    gain_of,
    is_wide,
    measure_case,
    parsed,
    theory,
)


@pytest.mark.parametrize(
    ("family", "windows"), [("llama", [12, 12]), ("gemma2", [5, 12])], ids=["full", "sliding"]
)
def test_theory_is_the_part_that_is_not_done(make_model, family, windows):
    """Two prompts of 12 tokens in one step; the last layer's attention is dropped."""
    model = make_model(family, **({"sliding_window": 5} if family == "gemma2" else {}))
    facts = {"flops_per_row": 10, "of_flops_per_row": 40, "num_attentions": 1}
    layers = [2 * sum(4 * 4 * 16 * min(p + 1, window) for p in range(12)) for window in windows]
    dropped = 10 * (24 - 2) + layers[-1] * (1 - 2 / 24)
    want = dropped / (40 * 24 + sum(layers))
    assert theory(model, facts, 2, 12) == pytest.approx(want)


def test_bars_of_long_prompts_only():
    cases = [
        Case("x", 1, n, 8192, 100.0, 70.0, 0.3, 0.29, 0.31, 9, 0.3).as_dict() for n in (512, 4096)
    ]
    shape = {"shape": "x", "cases": cases, "decode_ms": {1: (2.0, 2.1)}, "bytes": {8192: (10, 9)}}
    verdicts = {bar.what: bar.verdict for bar in all_bars([shape])}
    assert verdicts == {
        "gain / theory: x 1x4096, chunk 8192": "met",
        "decode on / off: x batch 1": "missed",
        "memory on / off: x chunk 8192": "met",
    }
    assert parsed("4x4096x8192") == (4, 4096, 8192)


def test_the_gain_is_that_of_pairs():
    """A clock that drifts meets both sides of a pair: medians of each alone would say 0.4."""
    case = Case.of("x", (2, 512, 2048), [10.0, 20.0, 40.0], [9.0, 12.0, 36.0], 0.3)
    assert case.gain == pytest.approx(0.1)
    assert (case.off_ms, case.on_ms) == (20.0, 12.0)
    assert case.as_dict()["on_tokens_s"] == pytest.approx(1024 / 12e-3)
    assert (case.low, case.high) == (pytest.approx(0.1), pytest.approx(0.4)), "the extremes of few"


@pytest.mark.parametrize("num_pairs", [6, 8, 16, 21, 30])
def test_the_interval_holds_the_median_of_all_gains(num_pairs):
    """In 95 of 100 samples of a skewed distribution, or more; the next narrower: in less."""
    generator = random.Random(num_pairs)
    median, found, tighter = 1.0 - (90.0 + math.log(2)) / 100.0, 0, 0
    for _ in range(2000):
        on = [90.0 + generator.expovariate(1.0) for _ in range(num_pairs)]
        _, low, high = gain_of([100.0] * num_pairs, on)
        inside = sorted(gain for gain in (1.0 - b / 100.0 for b in on) if low < gain < high)
        found += low <= median <= high
        tighter += inside[0] <= median <= inside[-1]
    assert found >= 0.94 * 2000
    assert tighter < 0.95 * 2000


@pytest.mark.parametrize(
    ("noise", "prompt_len", "seconds", "num_pairs"),
    [(0.0, 4096, 60.0, 9), (5.0, 512, 60.0, 9), (5.0, 4096, 0.0, 9), (5.0, 4096, 60.0, None)],
    ids=["narrow", "no bar", "no time", "wide"],
)
def test_pairs_until_the_interval_is_narrow(monkeypatch, noise, prompt_len, seconds, num_pairs):
    generator, warm, turns = random.Random(1), [], []

    def measured(session, num_reqs, length):
        turns.append(session)
        return session + generator.uniform(0, noise)

    monkeypatch.setattr(fast_prefill, "prefill_ms", lambda session, *args: warm.append(session))
    monkeypatch.setattr(fast_prefill, "turn_ms", measured)
    monkeypatch.setattr(fast_prefill, "theory", lambda *args: 0.1)
    args = argparse.Namespace(repeats=9, within=0.1, seconds=seconds)
    case, sides = (2, prompt_len, 8192), [Side(None), Side(None)]
    measure_case(sides, [100.0, 90.0], case, args)
    off, on = (side.ms[case] for side in sides)
    assert warm == [100.0, 90.0]
    assert len(off) == len(on) == len(turns) // 2
    if num_pairs is None:
        assert 20 < len(off) < 1000
        assert not is_wide(off, on, 0.02)
        assert is_wide(off[:-1], on[:-1], 0.02)
    else:
        assert len(off) == num_pairs
    assert {tuple(turns[4 * i : 4 + 4 * i]) for i in range(4)} == {(90.0, 100.0, 100.0, 90.0)}


def test_a_turn_is_the_median_of_a_second_and_a_half(monkeypatch):
    times = iter([300.0, 900.0, 200.0, 100.0, 400.0])
    monkeypatch.setattr(fast_prefill, "prefill_ms", lambda *args: next(times))
    assert fast_prefill.turn_ms(None, 1, 512) == 250.0
    assert next(times) == 400.0
