"""top-k, top-p and min-p: which tokens a row may draw.

They run in this order, which is that of Transformers; each sees what the one before kept. A filter
keeps the tokens whose logit is at least a threshold, so equally likely tokens stay or go together.
Filtered tokens become -inf and the others keep their numbers, so the race does not see whether a
row was filtered.

Top-p depends on a sum, and the order of a sum of floats may depend on the size of the batch. So the
weights exp(logit - largest) are added as integers, in units of 2**-40. FlashInfer's kernels add
floats: 7 of 100 calls kept other tokens of the same 90 rows (0.6.8, one H200, 2026-11-21).

R rows, V vocabulary.
"""

from collections.abc import Mapping

import torch

from graphs.sampling.race import LEAST_TEMPERATURE

_INF = torch.inf
_UNIT = 2.0**40
"""Integers that make a weight of 1; 2**22 weights of 1 still fit."""

_MOST_COUNTED = 2**20
"""Numbers of a row that the kernels count in twenty bits; longer rows are sorted."""


def filtered(logits: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits [R, V] in float32, -inf where top_k, top_p and min_p forbid the token.

    Five kernels find the thresholds on CUDA, a sort elsewhere and in larger vocabularies.
    """
    logits_RV = logits.float().nan_to_num(nan=-_INF, posinf=_INF, neginf=-_INF)
    temperature_R1 = fields["temperature"].unsqueeze(1)
    scaled_RV = logits_RV / temperature_R1.clamp(min=LEAST_TEMPERATURE)
    on_gpu = logits.device.type == "cuda" and logits.shape[1] < _MOST_COUNTED
    keep = kernel_keep if on_gpu else reference_keep
    kept_RV = keep(scaled_RV, fields["top_k"], fields["top_p"], fields["min_p"])
    return logits_RV.masked_fill(~(kept_RV | (temperature_R1 <= 0)), -_INF)


def reference_keep(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[R, V] bool: which tokens stay, by a sort of the logits over temperature [R, V] float32."""
    largest_R1 = scaled.amax(dim=-1, keepdim=True)
    ranked_RV = scaled.sort(dim=-1, descending=True).values
    k_R1 = _at_most(top_k, scaled.shape[1]).long().unsqueeze(1)
    by_k_R1 = ranked_RV.gather(1, k_R1 - 1)
    mass_RV = _mass(weights(ranked_RV, largest_R1).where(ranked_RV >= by_k_R1, 0.0))
    up_to_RV = mass_RV.cumsum(dim=-1)
    wanted_R1 = _wanted(top_p.unsqueeze(1), up_to_RV[:, -1:])
    in_p_RV = up_to_RV - mass_RV < wanted_R1
    by_p_R1 = ranked_RV.where(in_p_RV, _INF).amin(dim=-1, keepdim=True)
    by_p_R1 = by_p_R1.where(top_p.unsqueeze(1) < 1, -_INF)
    kept_RV = scaled >= torch.maximum(by_k_R1, by_p_R1)
    return kept_RV & (weights(scaled, largest_R1) >= min_p.unsqueeze(1))


def kernel_keep(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The same with kernels. exp may differ in its last bit, and so the last token of top_p."""
    from graphs.sampling.triton.select import thresholds

    least_R = thresholds(scaled, _at_most(top_k, scaled.shape[1]), top_p)
    kept_RV = scaled >= least_R.unsqueeze(1)
    return kept_RV & (weights(scaled, scaled.amax(-1, keepdim=True)) >= min_p.unsqueeze(1))


def weights(scaled: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """exp(scaled - largest), 1 where both are the same infinity."""
    return (scaled - largest).nan_to_num(nan=0.0, posinf=_INF, neginf=-_INF).exp()


def _at_most(top_k: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How many tokens stay, int32; 0 keeps all."""
    return torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)


def _mass(weight: torch.Tensor) -> torch.Tensor:
    return (weight * _UNIT).to(torch.int64)


def _wanted(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The least integer mass that is `top_p` of the total; at least 1."""
    return (top_p.double() * total.double()).ceil().to(torch.int64)
