"""Sampling on a GPU: kernels against plain PyTorch, captured, in any batch, without host reads.

R rows, V vocabulary.
"""

from typing import Any

import pytest
import torch

from graphs.sampling import (
    PenaltyState,
    SamplingParams,
    argmax,
    sample,
)
from graphs.sampling.filters import kernel_keep, reference_keep, weights
from graphs.sampling.params import Sampling
from graphs.sampling.philox import gumbel, words
from graphs.sampling.race import reference_race
from tests.kit.sampling import stacked

pytestmark = pytest.mark.gpu

VOCAB = 128256
KINDS = [Sampling.GREEDY, Sampling.RANDOM, Sampling.FILTERED, Sampling.PENALIZED]
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100000},
    {"top_p": 1e-30},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def params_of(num_rows, kind):
    """Rows of every kind up to `kind`, a seed each."""
    params = []
    for row in range(num_rows):
        keywords: dict[str, Any] = {"temperature": 0.2 + row % 7 / 4} if kind and row % 5 else {}
        if kind >= Sampling.FILTERED and row % 3:
            keywords |= FILTERS[row % len(FILTERS)]
        if kind >= Sampling.PENALIZED and row % 4:
            keywords |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
        params.append(SamplingParams(**keywords, seed=row * 7919 - 5))
    return params


class Step:
    """Static tensors of a step of some kind."""

    def __init__(self, num_rows, kind, dtype=torch.bfloat16, vocab_size=VOCAB):
        self.kind = kind
        self.logits = (torch.randn(num_rows, vocab_size, device="cuda") * 3).to(dtype)
        self.fields = stacked(params_of(num_rows, kind), "cuda")
        self.positions = torch.randint(0, 9000, (num_rows,), device="cuda")
        self.counts = PenaltyState.allocate(num_rows, vocab_size, "cuda")
        ids = torch.randint(vocab_size, (num_rows, 60)).tolist()
        self.counts.rebuild([row[:40] for row in ids], [row[30:] for row in ids])

    def __call__(self, rows: slice | torch.Tensor = slice(None)):
        counts = PenaltyState(self.counts.output_counts[rows], self.counts.in_prompt[rows])
        fields = {name: x[rows] for name, x in self.fields.items()}
        return sample(self.logits[rows], fields, self.positions[rows], self.kind, counts)

    def change(self):
        self.logits.copy_(self.logits[torch.randperm(len(self.logits), device="cuda")])
        self.positions += 1
        for x in self.fields.values():
            x.copy_(x.roll(1))
        self.fields["seed"] += 11


@pytest.mark.parametrize("vocab_size", [1000, 32000, 50257, VOCAB])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernel_draws_what_the_reference_draws(dtype, vocab_size):
    from graphs.sampling.triton.race import launch_race

    step = Step(64, Sampling.RANDOM, dtype, vocab_size)
    arguments = step.fields["temperature"], step.fields["seed"], step.positions
    tokens = launch_race(step.logits, *arguments)
    on_cpu = reference_race(*(x.cpu() for x in (step.logits, *arguments))).cuda()
    for wanted in (reference_race(step.logits, *arguments), on_cpu):
        differ = (tokens != wanted).nonzero().squeeze(1)
        assert len(differ) <= 1  # logarithms differ in their last bits
        noise = gumbel(words(arguments[1], arguments[2], vocab_size))
        score = step.logits.float() / arguments[0].clamp(min=1e-5).unsqueeze(1) + noise
        for row in differ.tolist():
            gap = score[row, tokens[row]] - score[row, wanted[row]]
            assert gap.abs() < 1e-5 * score[row].abs().max()


def test_kernel_draws_follow_the_softmax():
    logits_V = torch.randn(500, device="cuda") * 2
    num_draws = 200000
    tokens = torch.cat(
        [
            sample(
                logits_V.expand(20000, -1),
                stacked([SamplingParams(0.8, seed=3)] * 20000, "cuda"),
                torch.arange(first, first + 20000, device="cuda"),
                Sampling.RANDOM,
            )
            for first in range(0, num_draws, 20000)
        ]
    )
    expected = (logits_V.double() / 0.8).softmax(0) * num_draws
    counts = torch.bincount(tokens, minlength=500).double()
    often = expected >= 5
    statistic = ((counts - expected) ** 2 / expected)[often].sum().item()
    freedom = int(often.sum()) - 1
    assert statistic < freedom + 4.3 * (2 * freedom) ** 0.5 + 20
    assert counts[~often].sum() < expected[~often].sum() + 30


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 8, 256])
def test_tokens_do_not_depend_on_the_batch(kind, num_rows):
    step = Step(num_rows, kind)
    whole = step()
    assert torch.equal(step(), whole)
    order = torch.randperm(num_rows, device="cuda")
    assert torch.equal(step(order), whole[order])
    for row in range(0, num_rows, 37):
        assert torch.equal(step(slice(row, row + 1)), whole[row : row + 1])
    for size in (num_rows // 2, num_rows // 3):
        assert torch.equal(step(slice(0, size)), whole[:size])


def test_neutral_rows_draw_the_same_in_every_kind():
    step = Step(32, Sampling.RANDOM)
    step.fields["temperature"][::4] = 0
    tokens = {}
    for step.kind in KINDS[1:]:
        tokens[step.kind] = step()
    assert torch.equal(tokens[Sampling.RANDOM], tokens[Sampling.FILTERED])
    assert torch.equal(tokens[Sampling.RANDOM], tokens[Sampling.PENALIZED])
    assert torch.equal(tokens[Sampling.RANDOM][::4], argmax(step.logits)[::4])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 24])
def test_a_captured_draw_equals_the_called_one(kind, num_rows):
    step = Step(num_rows, kind)
    active = torch.ones(num_rows, dtype=torch.bool, device="cuda")

    def run():
        tokens = step()
        step.counts.update(tokens, active)
        return tokens

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    seen = set()
    for _ in range(12):
        before = step.counts.output_counts.clone()
        wanted = step()
        graph.replay()
        assert torch.equal(captured, wanted)
        change = step.counts.output_counts - before
        assert torch.equal(change.nonzero()[:, 1], wanted)
        assert change.sum() == num_rows
        seen.add(tuple(wanted.tolist()))
        step.change()
    assert len(seen) > 1 or num_rows == 1  # whose logits stay


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_reads_the_device(kind):
    step = Step(8, kind)
    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
        step.counts.update(step.positions, step.positions > 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_rows", [1, 9, 90])
@pytest.mark.parametrize("vocab_size", [1000, 50257, VOCAB])
def test_kernels_keep_what_the_sort_keeps(num_rows, vocab_size):
    params = [SamplingParams(1.0, **FILTERS[row % len(FILTERS)]) for row in range(num_rows)]
    fields = stacked(params, "cuda")
    scaled = torch.randn(num_rows, vocab_size, device="cuda") * 3
    scaled[:, ::10] = -torch.inf
    arguments = scaled, fields["top_k"], fields["top_p"], fields["min_p"]
    kept, wanted = kernel_keep(*arguments), reference_keep(*arguments)
    exact = fields["top_p"] == 1
    assert torch.equal(kept[exact], wanted[exact])
    weight = weights(scaled, scaled.amax(-1, keepdim=True)).double()
    share = weight / weight.sum(-1, keepdim=True)
    misjudged = (share * (kept != wanted)).sum(-1).max()  # on the edge of top_p
    assert misjudged < 1e-3, misjudged
    print(float(misjudged))
    for _ in range(20):
        assert torch.equal(kernel_keep(*arguments), kept)
    some = slice(0, (num_rows + 1) // 2)
    assert torch.equal(kernel_keep(*(x[some] for x in arguments)), kept[some])


def test_rows_of_infinities_and_nan():
    step = Step(4, Sampling.FILTERED)
    step.fields["temperature"].fill_(1.0)
    step.fields["top_k"].copy_(torch.tensor([0, 5, 0, 5], device="cuda"))
    step.fields["top_p"].copy_(torch.tensor([0.5, 0.5, 1.0, 0.9], device="cuda"))
    step.logits[0] = -torch.inf
    step.logits[1] = torch.nan
    step.logits[2, 77] = torch.inf
    step.logits[3, 50] = torch.nan
    for step.kind in KINDS[1:3]:
        tokens = step().tolist()
        assert tokens[:3] == [0, 0, 77]
        assert 0 <= tokens[3] < VOCAB
        assert tokens[3] != 50
