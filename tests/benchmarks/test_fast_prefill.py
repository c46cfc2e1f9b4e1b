"""What `benchmarks.fast_prefill` counts, against sums by hand."""

import pytest

from benchmarks.fast_prefill import row_of, theory


@pytest.mark.parametrize(
    ("family", "windows"), [("llama", [12, 12]), ("gemma2", [5, 12])], ids=["full", "sliding"]
)
def test_theory_is_the_part_that_is_not_done(make_model, family, windows):
    """Two prompts of 12 tokens in one step; the last layer's attention is dropped."""
    model = make_model(family, **({"sliding_window": 5} if family == "gemma2" else {}))
    facts = {"flops_per_row": 10, "of_flops_per_row": 40, "num_attentions": 1}
    layers = [2 * sum(4 * 4 * 16 * min(p + 1, window) for p in range(12)) for window in windows]
    dropped = 10 * (24 - 2) + layers[-1] * (1 - 2 / 24)
    assert theory(model, facts, 2, 12) == pytest.approx(dropped / (40 * 24 + sum(layers)))


def test_the_gain_is_that_of_pairs():
    """A clock that drifts meets both sides of a pair: medians of each alone would say 0.4."""
    row = row_of((2, 512, 2048), [10.0, 20.0, 40.0], [9.0, 12.0, 36.0], 0.3)
    assert row["gain"] == pytest.approx(0.1)
    assert row["gain / theory"] == "0.33 (0.33 to 1.33)"
    assert (row["off, ms"], row["on, ms"]) == (20.0, 12.0)
    assert row["tokens/s on"] == pytest.approx(1024 / 12e-3, rel=1e-4)
