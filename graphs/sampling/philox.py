"""Random numbers that are a function of (seed, position, vocabulary index), in plain PyTorch.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its key is
the seed; its counter is (n, 0, position's low and high half). A counter gives four words of 32
bits, for four vocabulary indices at distances of LANES, so that a kernel loads runs of logits:

    index = n // LANES * 4 * LANES + word * LANES + n % LANES

R rows, V vocabulary, C counters of a row.
"""

import torch

LANES = 256
"""A part of the definition: another number draws other tokens."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four words of every counter. All tensors are int64, hold 32 bits and broadcast.

    int64 products overflow, but their low 64 bits are right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1 = high1 ^ c1 ^ k0, product1 & _MASK
        c2, c3 = high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of int64 numbers."""
    return x & _MASK, (x >> 32) & _MASK


def words(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] int64 that hold 32 random bits; seeds and positions [R] int64."""
    num_rows, num_blocks = seeds.shape[0], -(-vocab_size // (4 * LANES))
    lanes = min(LANES, vocab_size)  # a small vocabulary needs only some of the first words
    n_1C = torch.arange(num_blocks * lanes, device=seeds.device).unsqueeze(0)
    low_R1, high_R1 = halves(positions.unsqueeze(1))
    drawn = philox((n_1C, torch.zeros_like(n_1C), low_R1, high_R1), halves(seeds.unsqueeze(1)))
    drawn_RC = [word.expand(num_rows, -1).unflatten(1, (num_blocks, lanes)) for word in drawn]
    return torch.stack(drawn_RC, dim=2).flatten(1)[:, :vocab_size]


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Gumbel noise -log(e), e = -log(1 - v), of v = (word + 1/2) / 2**32, in float32.

    v is at least 2**-33 and, rounded, at most 1 - 2**-24: the noise is from -2.82 to 22.9. It is
    finest where v is small, where a race is won; there log(1 - v) would lose the digits of v.
    """
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * 0.25)))
    e = torch.where(v < 2.0**-7, series, -torch.log(1.0 - v))
    return -torch.log(e)
