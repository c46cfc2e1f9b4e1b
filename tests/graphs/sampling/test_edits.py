"""Edits of logits: the reference against loops, the kernel against the reference."""

import numpy as np
import pytest
import torch

from graphs.sampling.edits import Editing, Edits, edited, num_words, reference_allowed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 70


def bits(row: np.ndarray, vocab_size: int = VOCAB) -> list[int]:
    """Tokens whose bits are set."""
    return [t for t in range(vocab_size) if row[t // 32] >> (t % 32) & 1]


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_forbids_what_the_reference_does(vocab_size, dtype):
    pytest.importorskip("triton")
    from graphs.sampling.triton.edits import launch_allowed

    logits_RV = torch.randn(3, vocab_size + 5).to(dtype)[:, :vocab_size]
    logits_RV[0, 0] = torch.nan
    allowed_RW = torch.randint(-(2**31), 2**31 - 1, (3, num_words(vocab_size)), dtype=torch.int32)
    found = launch_allowed(logits_RV.to(DEVICE), allowed_RW.to(DEVICE)).cpu()
    wanted = reference_allowed(logits_RV, allowed_RW)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for row in range(3):
        kept = bits(allowed_RW[row].numpy(), vocab_size)
        assert (wanted[row] != -torch.inf).nonzero()[:, 0].tolist() == kept


def test_biases_and_stops_before_a_length():
    logits_RV = torch.randn(2, VOCAB)
    tensors = {
        "allowed": torch.full((2, num_words(VOCAB)), -1, dtype=torch.int32),
        "bias_ids": torch.tensor([[3, 0], [69, 7]]),
        "bias_values": torch.tensor([[2.0, 0.0], [-1.0, 5.0]]),
        "min_lengths": torch.tensor([10, 10]),
        "stop_tokens": torch.tensor([[4, -1], [5, 6]]),
    }
    before = logits_RV.clone()
    found = edited(logits_RV, tensors, torch.tensor([9, 10]))
    wanted = before.clone()
    wanted[0, 3] += 2.0
    wanted[1, 69] -= 1.0
    wanted[1, 7] += 5.0
    wanted[0, 4] = -torch.inf
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.equal(logits_RV, before), "the model's logits stay"


def test_rows_of_bits():
    row = np.empty(num_words(VOCAB), dtype=np.int32)
    Edits.of(VOCAB, allowed_token_ids=[0, 31, 32, 69]).fill(row, [])
    assert bits(row) == [0, 31, 32, 69]
    words = Edits.of(VOCAB, bad_words=[[31], [5, 6, 63], [6, 2]])
    assert (words.kind, words.longest) == (Editing.BY_TOKENS, 2)
    for tokens, forbidden in (([5, 6], {31, 63, 2}), ([6], {31, 2}), ([6, 5], {31}), ([], {31})):
        words.fill(row, tokens)
        assert set(range(VOCAB)) - set(bits(row)) == forbidden


def test_there_are_no_bits_behind_the_vocabulary():
    """So that a row is 0 where nothing may follow."""
    row, others = np.empty(num_words(VOCAB), dtype=np.int32), [[t] for t in range(VOCAB - 1)]
    words = Edits.of(VOCAB, bad_words=[*others, [VOCAB - 1] * 2])
    words.fill(row, [VOCAB - 1])
    assert not row.any()
    words.fill(row, [3])
    assert bits(row, 32 * row.size) == [VOCAB - 1]


def test_kinds():
    assert Edits.of(VOCAB).kind is Editing.NONE
    for asked in ({"min_tokens": 1}, {"logit_bias": {1: 2}}, {"bad_words": [[1]]}):
        assert Edits.of(VOCAB, **asked).kind is Editing.STATIC
