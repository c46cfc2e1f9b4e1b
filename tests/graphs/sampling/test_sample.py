"""`sample`: distributions of every kind in one batch; a token depends on its own row alone."""

import pytest
import torch

from graphs.sampling import PenaltyState, SamplingParams, argmax, sample
from graphs.sampling.params import Sampling
from tests.graphs.sampling.exact import brute_force, check_draws
from tests.kit.sampling import stacked

PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(0.7, seed=2),
    SamplingParams(1.5, seed=-3),
    SamplingParams(1.0, top_k=3, seed=4),
    SamplingParams(0.9, top_p=0.7, seed=5),
    SamplingParams(1.1, min_p=0.2, seed=6),
    SamplingParams(1.3, top_k=8, top_p=0.9, min_p=0.05, seed=7),
    SamplingParams(0.0, repetition_penalty=3.0, seed=8),
    SamplingParams(1.0, presence_penalty=1.0, frequency_penalty=0.5, seed=9),
    SamplingParams(0.8, 5, 0.9, 0.01, 1.4, -0.5, 0.3, seed=10),
]
"""Every kind: a mixed batch."""

HISTORY = ([1, 2, 3], [3, 3, 5])


def draw(logits, params, positions, kind: Sampling | None = None, history=HISTORY):
    kind = max(p.kind for p in params) if kind is None else kind
    counts = None
    if kind == Sampling.PENALIZED:
        counts = PenaltyState.allocate(len(logits), logits.shape[1], "cpu")
        counts.rebuild([history[0]] * len(params), [history[1]] * len(params))
    return sample(logits, stacked(params), positions, kind, counts)


def test_distribution_of_every_row_of_a_mixed_batch():
    num_draws = 5000
    logits = torch.randn(len(PARAMS), 16) * 1.5
    positions = torch.arange(num_draws).repeat(len(PARAMS))
    tokens = draw(
        logits.repeat_interleave(num_draws, 0),
        [p for p in PARAMS for _ in range(num_draws)],
        positions,
    )
    for row, (params, drawn) in enumerate(
        zip(PARAMS, tokens.view(len(PARAMS), num_draws), strict=True)
    ):
        probabilities = brute_force(logits[row], params, *HISTORY)
        check_draws(drawn, probabilities)
        assert drawn.unique().numel() > 1 or max(probabilities) == 1


def test_seeds_give_independent_draws():
    """One position, many seeds: the numbers of one seed do not tell those of the next."""
    logits = torch.randn(12)
    params = [SamplingParams(1.0, seed=seed) for seed in range(20000)]
    tokens = draw(logits.expand(20000, -1), params, torch.full((20000,), 5))
    p = logits.double().softmax(0)
    check_draws(tokens, p.tolist())
    pairs = tokens[:-1] * 12 + tokens[1:]
    check_draws(pairs[::2], torch.outer(p, p).flatten().tolist())


def test_consecutive_positions_are_independent():
    logits = torch.randn(12)
    tokens = draw(
        logits.expand(40000, -1), [SamplingParams(1.0, seed=3)] * 40000, torch.arange(40000)
    )
    p = logits.double().softmax(0)
    pairs = tokens[:-1] * 12 + tokens[1:]
    check_draws(pairs[::2], torch.outer(p, p).flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_do_not_depend_on_the_batch(dtype):
    num_rows = 40
    logits = (torch.randn(num_rows, 1500) * 2).to(dtype)
    params = [PARAMS[row % len(PARAMS)] for row in range(num_rows)]
    positions = torch.randint(0, 5000, (num_rows,))
    whole = draw(logits, params, positions)
    for order in (torch.randperm(num_rows), torch.arange(num_rows).flip(0), torch.randperm(7)):
        some = draw(logits[order], [params[i] for i in order], positions[order])
        assert torch.equal(some, whole[order])
    for row, one in enumerate(params):  # alone, and in a step of each kind that can do it
        for kind in Sampling:
            if kind >= one.kind:
                history = HISTORY if one.kind == Sampling.PENALIZED else ([1], [2, 2])
                alone = slice(row, row + 1)
                token = draw(logits[alone], [one], positions[alone], kind, history)
                assert token == whole[row], (one, kind)


@pytest.mark.parametrize("kind", list(Sampling), ids=lambda kind: kind.name)
def test_greedy_rows_are_argmax_in_every_kind(kind):
    logits = torch.randn(20, 4096).to(torch.bfloat16)  # with ties
    tokens = draw(logits, [SamplingParams(top_k=3)] * 20, torch.arange(20), kind)
    assert torch.equal(tokens, argmax(logits))
    assert torch.equal(tokens, logits.float().argmax(-1))


def test_logits_are_not_changed():
    logits = torch.randn(len(PARAMS), 50)
    before = logits.clone()
    draw(logits, PARAMS, torch.arange(len(PARAMS)))
    assert torch.equal(logits, before)


def test_bad_arguments_are_named():
    logits, fields = torch.zeros(2, 9), stacked([SamplingParams(1.0)] * 2)
    positions = torch.arange(2)
    with pytest.raises(ValueError, match=r"^counts must be a PenaltyState .* got None"):
        sample(logits, fields, positions, Sampling.PENALIZED)
    with pytest.raises(ValueError, match=r"^counts must have the shape of logits, \[2, 9\], got"):
        sample(logits, fields, positions, Sampling.PENALIZED, PenaltyState.allocate(2, 8, "cpu"))
    with pytest.raises(ValueError, match=r"^positions must be torch.int64 of shape \[2\] on cpu"):
        sample(logits, fields, positions.int(), Sampling.RANDOM)
    with pytest.raises(ValueError, match=r"^fields\['top_k'\] must be torch.int32 of shape \[2\]"):
        sample(logits, {**fields, "top_k": torch.zeros(3)}, positions, Sampling.RANDOM)
    partial = {name: fields[name] for name in fields if name != "seed"}
    with pytest.raises(ValueError, match=r"^fields\['seed'\] must be given, got only"):
        sample(logits, partial, positions, Sampling.RANDOM)
    with pytest.raises(ValueError, match=r"^logits must be \[num_rows, vocab_size\]"):
        sample(logits[0], fields, positions, Sampling.RANDOM)


def test_tiny_temperatures_are_greedy():
    logits = torch.randn(3, 50)
    params = [SamplingParams(temperature=t) for t in (1e-40, 1e-7, 0.0)]
    tokens = sample(logits, stacked(params), torch.arange(3), Sampling.RANDOM)
    assert torch.equal(tokens, logits.argmax(-1))
