"""What `benchmarks.fast_prefill` counts, against sums by hand."""

import pytest

from benchmarks.fast_prefill import Case, all_bars, parsed, theory


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
    cases = [Case("x", 1, n, 8192, 100.0, 70.0, 0.3, 0.3).as_dict() for n in (512, 4096)]
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
