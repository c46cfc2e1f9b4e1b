"""Log-probabilities of drawn tokens and of the k most likely ones. R rows, V vocabulary."""

from typing import Any, NamedTuple

import numpy as np
import torch

MOST = 64
"""Most likely tokens of a row that can be asked for."""


class LogProbs(NamedTuple):
    """Log-probabilities of R rows: those of a given token, then those of the k most likely."""

    values: torch.Tensor  # [R, 1 + k] float32, natural logarithm
    ids: torch.Tensor  # [R, 1 + k] int32; of equally likely tokens the first comes first
    ranks: torch.Tensor  # [R] int32: 1 + the number of tokens that are likelier than the given one


WIDTHS = (0, 8, 32, MOST)
"""Numbers of most likely tokens that steps compute; a request gets the first ones of its step's."""


def width_of(k: int, vocab_size: int) -> int:
    """How many a step computes for a request that asks for `k`."""
    return min(next(width for width in WIDTHS if width >= k), vocab_size)


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


def packed(found: LogProbs) -> torch.Tensor:
    """[R, 1 + k] int64: a value's bits, and above them its id; in the first column the rank."""
    above_RK = found.ids.clone()
    above_RK[:, 0] = found.ranks
    bits_RK = found.values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return (above_RK.long() << 32) | bits_RK


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait: what is not pinned is waited for."""
    x = torch.from_numpy(array)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


SCORED_ROWS = 512
"""Rows that are scored at a time where that copies them: in plain PyTorch."""


def scored(logits: torch.Tensor, given: np.ndarray, k: int, token_ids: np.ndarray) -> torch.Tensor:
    """`packed` log-probabilities of given tokens, and of more of them in further columns.

    Args:
        logits: [R, V], any float dtype.
        given: [R] int64, the tokens.
        k: most likely tokens beside them.
        token_ids: [R, M] int64: others.

    Returns:
        [R, 1 + k + M] int64.
    """
    tokens_RM = to_device(np.column_stack([given, token_ids]), logits.device)
    size = logits.shape[0] if logits.device.type == "cuda" else SCORED_ROWS
    found = []
    for rows_nV, tokens_nM in zip(logits.split(size), tokens_RM.split(size), strict=True):
        columns = [packed(log_probs(rows_nV, tokens_nM[:, 0], k))]
        for m in range(1, tokens_nM.shape[1]):
            columns.append(packed(log_probs(rows_nV, tokens_nM[:, m])))
        found.append(torch.cat(columns, 1))
    return torch.cat(found)


def unpacked(row: np.ndarray) -> tuple[list[Any], list[Any]]:
    """The upper integers and the values of a row [1 + k] of `packed`, or of rows."""
    return (row >> 32).tolist(), row.astype(np.uint32).view(np.float32).tolist()


def reference_log_probs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> LogProbs:
    """`log_probs` in plain PyTorch."""
    logits_RV = logits.float()
    logits_RV = logits_RV.masked_fill(logits_RV.isnan(), -torch.inf)
    values_RV = logits_RV.log_softmax(-1)
    token_R1 = tokens.long().unsqueeze(1)
    greater_RV = logits_RV > logits_RV.gather(1, token_R1)
    ids_Rk = token_R1[:, :0]
    if k:
        ids_Rk = logits_RV.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids_RK = torch.cat([token_R1, ids_Rk], 1)
    ranks_R = 1 + greater_RV.sum(1)
    return LogProbs(values_RV.gather(1, ids_RK), ids_RK.int(), ranks_R.int())
