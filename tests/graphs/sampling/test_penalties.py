"""Penalties against Transformers and their formulas; the counts they read."""

import pytest
import torch

from graphs.sampling import PenaltyState, SamplingParams
from graphs.sampling.penalties import penalized
from tests.kit.sampling import stacked

VOCAB = 30
PROMPTS = [[1, 2, 2, 29], [], [5], [0, 3]]
OUTPUTS = [[2, 7, 7, 7], [4], [], [3, 3]]


def state_of(prompts=PROMPTS, outputs=OUTPUTS):
    state = PenaltyState.allocate(len(prompts), VOCAB, "cpu")
    state.rebuild(prompts, outputs)
    return state


def wanted_counts(outputs):
    return torch.stack([torch.bincount(torch.tensor(o).long(), minlength=VOCAB) for o in outputs])


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_is_that_of_transformers(penalty):
    transformers = pytest.importorskip("transformers")
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    logits = torch.randn(4, VOCAB)
    logits[0, 2], logits[0, 7] = 0.0, -torch.inf
    fields = stacked([SamplingParams(repetition_penalty=penalty)] * 4)
    out = penalized(logits, fields, state_of())
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        seen = torch.tensor([prompt + output])
        wanted = processor(seen, logits[row : row + 1].clone())
        torch.testing.assert_close(out[row : row + 1], wanted, rtol=1e-6, atol=0)


def test_presence_and_frequency():
    logits = torch.randn(4, VOCAB)
    params = [SamplingParams(presence_penalty=0.5, frequency_penalty=0.25 * i) for i in range(4)]
    out = penalized(logits, stacked(params), state_of())
    wanted = logits.clone()
    for row, output in enumerate(OUTPUTS):
        for token in set(output):
            wanted[row, token] -= 0.5 + 0.25 * row * output.count(token)
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


def test_neutral_penalties_change_no_bit():
    logits = torch.randn(4, VOCAB).to(torch.bfloat16)
    logits[0, 2], logits[1, 4], logits[2, 5] = -torch.inf, -0.0, torch.inf
    out = penalized(logits, stacked([SamplingParams()] * 4), state_of())
    assert torch.equal(out, logits.float())


def test_rebuild_counts_and_forgets():
    state = state_of()
    assert torch.equal(state.output_counts.long(), wanted_counts(OUTPUTS))
    assert state.in_prompt.nonzero().tolist() == [[0, 1], [0, 2], [0, 29], [2, 5], [3, 0], [3, 3]]
    state.rebuild([[9]], [[8, 8]])
    assert torch.equal(state.output_counts.long(), wanted_counts([[8, 8], [], [], []]))
    assert state.in_prompt.nonzero().tolist() == [[0, 9]]


def test_rebuild_of_some_rows():
    state = state_of()
    state.rebuild([[9], []], [[8], [6, 6]], rows=[2, 0])
    assert torch.equal(state.output_counts.long(), wanted_counts([[6, 6], [4], [8], [3, 3]]))
    assert state.in_prompt.nonzero().tolist() == [[2, 9], [3, 0], [3, 3]]


def test_update_counts_active_rows_in_a_view():
    state = state_of()
    view = state.view(3)
    view.update(torch.tensor([7, -1, 29]), torch.tensor([True, False, True]))
    view.update(torch.tensor([7, 4, 29], dtype=torch.int32), torch.tensor([True, True, False]))
    updated = [[*OUTPUTS[0], 7, 7], [4, 4], [29], OUTPUTS[3]]
    assert torch.equal(state.output_counts.long(), wanted_counts(updated))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([[1]], []), "outputs and rows must be as many as prompts, 1, got 0 and 1"),
        (([[1]], [[]], [0, 1]), "outputs and rows must be as many as prompts, 1, got 1 and 2"),
        (([[]] * 5, [[]] * 5), "rows must be from 0 to 3, got 4"),
        (([[]], [[]], [-1]), "rows must be from 0 to 3, got -1"),
        (([[VOCAB]], [[]]), "tokens must be from 0 to 29, got 30"),
        (([[]], [[-1]]), "tokens must be from 0 to 29, got -1"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_changes(arguments, said):
    state = state_of()
    with pytest.raises(ValueError, match=f"^{said}"):
        state.rebuild(*arguments)
    assert torch.equal(state.output_counts.long(), wanted_counts(OUTPUTS))
