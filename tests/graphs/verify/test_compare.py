"""How two tensors compare, and what a sum of rows sees."""

import torch

from graphs.capture.verifier import compare, excused_rows, row_sums


def test_bytes_that_are_not_fp8_are_integers():
    mine = torch.tensor([250, 3], dtype=torch.uint8)
    assert compare("x", mine, mine.clone(), 0.5).ok
    wrong = compare("x", mine, torch.tensor([3, 3], dtype=torch.uint8), 0.5)
    assert (wrong.difference, wrong.where) == (247, (0,))


def test_zeros_must_be_equal():
    zeros = torch.zeros(3)
    assert compare("x", zeros, zeros.clone(), 0.1).ok
    assert not compare("x", torch.tensor([0.0, 1e-30, 0.0]), zeros, 0.1).ok


def test_tokens_outside_the_vocabulary_have_no_logit():
    logits = torch.tensor([[2.0, 2.0, 0.0]]).repeat(3, 1)
    mine, theirs = torch.tensor([-1, 1, 5]), torch.tensor([0, 0, 2])
    excused = excused_rows({"tokens": mine}, {"tokens": theirs, "logits": logits}, 0.1, None)
    assert excused is not None
    assert excused.tolist() == [False, True, False]


def test_sums_taken_in_parts_are_those_of_the_whole():
    cache = torch.randint(0, 255, (17, 2, 256, 16, 256), dtype=torch.uint8)
    parts = row_sums(cache)
    assert parts.shape == (17, 2, 256)
    for block in (0, 7, 8, 16):
        assert torch.equal(row_sums(cache[block : block + 1])[0], parts[block])
