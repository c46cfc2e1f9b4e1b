"""Log-probabilities of drawn tokens and of the k most likely ones. R rows, V vocabulary."""

from typing import NamedTuple

import torch

MOST = 64
"""Most likely tokens of a row that can be asked for."""


class LogProbs(NamedTuple):
    """Log-probabilities of R rows: those of a given token, then those of the k most likely."""

    values: torch.Tensor  # [R, 1 + k] float32, natural logarithm
    ids: torch.Tensor  # [R, 1 + k] int32; of equally likely tokens the first comes first
    ranks: torch.Tensor  # [R] int32: 1 + the number of tokens that are likelier than the given one


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, k: int = 0) -> LogProbs:
    """Log-probabilities in float32; they read nothing on the host, so they can be captured.

    Args:
        logits: [R, V], any float dtype. NaN counts as -inf.
        tokens: [R] int64, the given tokens.
        k: most likely tokens beside them, up to `MOST` and V.

    Raises:
        ValueError: `k` is out of range.
    """
    most = min(MOST, logits.shape[1])
    if not 0 <= k <= most:
        raise ValueError(f"logprobs must be from 0 to {most}, got {k}; supported: 0 to {most}")
    compute = reference_log_probs
    if logits.device.type == "cuda":
        from graphs.sampling.triton.logprobs import launch_log_probs as compute
    return LogProbs(*compute(logits, tokens, k))


def reference_log_probs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> LogProbs:
    """`log_probs` in plain PyTorch."""
    logits_RV = logits.float()
    logits_RV = logits_RV.masked_fill(logits_RV.isnan(), -torch.inf)
    values_RV = logits_RV.log_softmax(-1)
    token_R1 = tokens.long().unsqueeze(1)
    greater_RV = logits_RV > logits_RV.gather(1, token_R1)
    ids_Rk = logits_RV.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids_RK = torch.cat([token_R1, ids_Rk], 1)
    ranks_R = 1 + greater_RV.sum(1)
    return LogProbs(values_RV.gather(1, ids_RK), ids_RK.int(), ranks_R.int())
