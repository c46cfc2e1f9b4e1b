"""Draws from logits: Gumbel-max in float32, in plain PyTorch.

With Gumbel noise, argmax(logits / temperature + noise) has the distribution
softmax(logits / temperature). Every index has its own random number (`philox`), so no sum over the
row has an order that could matter. R rows, V vocabulary.
"""

import torch

from graphs.sampling.philox import gumbel, words

LEAST_TEMPERATURE = 1e-5
"""What smaller ones act as: no quotient overflows."""


def reference_race(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Tokens [R] int64 of logits [R, V]; temperature [R] 0 takes the largest logit.

    The score is rounded to float32, so that at temperatures below 0.01 equal logits may tie; the
    first of equal scores wins. The kernel is `triton.race`.
    """
    logits_RV = logits.float()
    temperature_R1 = temperatures.unsqueeze(1)
    noise_RV = gumbel(words(seeds, positions, logits.shape[1]))
    raced_RV = logits_RV / temperature_R1.clamp(min=LEAST_TEMPERATURE) + noise_RV
    score_RV = torch.where(temperature_R1 > 0, raced_RV, logits_RV)
    return score_RV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(dim=-1)
