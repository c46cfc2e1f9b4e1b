"""Exact distributions of a row's token, and a test of draws against them. V vocabulary."""

import math
from collections.abc import Sequence

import torch

from graphs.sampling import SamplingParams


def brute_force(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> list[float]:
    """Probabilities of the tokens of one row [V], in Python floats, filter by filter."""
    x = [float(value) for value in logits]
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if params.temperature == 0:
        return [float(i == x.index(max(x))) for i in range(len(x))]
    z = [value / params.temperature for value in x]
    weight = [math.exp(value - max(z)) for value in z]
    if params.top_k:
        least = sorted(weight)[-min(params.top_k, len(weight))]
        weight = [w if w >= least else 0.0 for w in weight]
    wanted = params.top_p * sum(weight)
    if params.top_p < 1:
        weight = [w if sum(v for v in weight if v > w) < wanted else 0.0 for w in weight]
    weight = [w if w >= params.min_p * max(weight) else 0.0 for w in weight]
    return [w / sum(weight) for w in weight]


def check_draws(tokens: torch.Tensor, probabilities: Sequence[float]) -> None:
    """Only possible tokens, and Pearson's chi-square below its quantile of 1 - 1e-5.

    The quantile is that of Wilson and Hilferty (1931). Tokens expected fewer than 5 times count
    as one.
    """
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    cells, rest = [], [0.0, 0.0]
    for count, probability in zip(counts, probabilities, strict=True):
        expected = probability * len(tokens)
        assert expected > 0 or count == 0, "an impossible token was drawn"
        if expected >= 5:
            cells.append((count, expected))
        else:
            rest = [rest[0] + count, rest[1] + expected]
    cells += [tuple(rest)] if rest[1] >= 1 else []
    if len(cells) < 2:
        return
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    critical = freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3
    assert statistic < critical, f"chi-square {statistic:.1f} of {freedom}, at most {critical:.1f}"
