"""The random numbers: known answers, the layout over the vocabulary, noise without infinities."""

import math

import pytest
import torch

from graphs.sampling.philox import LANES, gumbel, philox, words

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, words.
KNOWN = """
00000000 00000000 00000000 00000000, 00000000 00000000, 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff, ffffffff ffffffff, 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344, a4093822 299f31d0, d16cfe09 94fdcceb 5001e420 24126ea1
"""


def scalar_philox(counter, key):
    """Philox 4x32-10 in Python's integers, from the paper's definition."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = (p1 >> 32) ^ x1 ^ k0, p1 % 2**32
        x2, x3 = (p0 >> 32) ^ x3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [x0, x1, x2, x3]


@pytest.mark.parametrize("known", KNOWN.split("\n")[1:-1])
def test_known_answers(known):
    counter, key, answer = ([int(word, 16) for word in part.split()] for part in known.split(","))
    assert scalar_philox(counter, key) == answer
    x0, x1, x2, x3 = map(torch.tensor, counter)
    k0, k1 = map(torch.tensor, key)
    drawn = philox((x0, x1, x2, x3), (k0, k1))
    assert [word.item() for word in drawn] == answer


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 + 5, 2**62])
def test_words_of_seed_position_and_index(seed, position):
    drawn_V = words(torch.tensor([3, seed]), torch.tensor([9, position]), 2500)[1]
    assert drawn_V.shape == (2500,)
    key = [seed % 2**32, seed % 2**64 >> 32]
    for index in (0, 1, 255, 256, 1023, 1024, 1300, 2047, 2048, 2499):
        n = index // (4 * LANES) * LANES + index % LANES
        answer = scalar_philox([n, 0, position % 2**32, position >> 32], key)
        assert drawn_V[index] == answer[index // LANES % 4]


def test_words_of_a_smaller_vocabulary_are_its_first():
    seeds, positions = torch.arange(3), torch.arange(3) + 10
    whole_RV = words(seeds, positions, 3000)
    for size in (1, 255, 256, 1024, 1025):
        assert torch.equal(words(seeds, positions, size), whole_RV[:, :size])


def test_noise_is_finite_and_falls():
    extremes = torch.tensor([0, 1, 2**25 - 1, 2**25, 2**31, 2**32 - 128, 2**32 - 1])
    noise = gumbel(extremes)
    assert noise.isfinite().all()
    assert (noise.diff() <= 0).all()
    exact = [-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in extremes[:5].tolist()]
    assert noise[:5].tolist() == pytest.approx(exact, rel=1e-5)


def test_noise_has_gumbels_mean_and_variance():
    noise = gumbel(words(torch.arange(50), torch.zeros(50, dtype=torch.int64), 20000)).double()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=5 * math.pi / math.sqrt(6e6))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert torch.corrcoef(noise[:, :1000]).fill_diagonal_(0).abs().max() < 0.2
