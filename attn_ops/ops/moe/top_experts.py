"""`attn_ops::top_experts`: what a router's scores choose, and with which weights.

T rows, E experts, top_k of them a row.
"""

from typing import Any

import torch

from attn_ops.ops.library import operator
from attn_ops.ops.products.skinny_constants import is_measured

WEIGHTS = ("scores", "sum", "softmax")
MOST_EXPERTS = 1024
MOST_CHOSEN = 32
"""Of the kernel, which finds one after the other."""


def _check(
    scores: torch.Tensor,
    top_k: int,
    *,
    softmax: bool = False,
    weights: str = "scores",
    dtype: torch.dtype | None = None,
) -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be floating-point of shape [T, E], got {scores.dtype} "
            f"{list(scores.shape)}"
        )
    if not 1 <= top_k <= scores.shape[1]:
        raise ValueError(f"top_k must be from 1 to the experts {scores.shape[1]}, got {top_k}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be known, got {weights!r}; supported: {', '.join(WEIGHTS)}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating-point, got {dtype}")


def _fake(scores: torch.Tensor, top_k: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    new, wide = scores.new_empty((scores.shape[0], top_k)), more.get("dtype") or torch.float32
    return new.to(wide), new.to(torch.int64)


@operator(fake=_fake, check=_check)
def top_experts(
    scores: torch.Tensor,
    top_k: int,
    *,
    softmax: bool = False,
    weights: str = "scores",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row with the highest scores, and their weights.

    On Hopper GPUs one kernel computes it, row by row, so that a row does not depend on the others.

    Args:
        scores: [T, E].
        top_k: experts of a row. Of equal scores the first ones are chosen; NaN is the highest.
        softmax: choose by the softmax of a row, not by the scores themselves.
        weights: "scores": by what the experts were chosen; "sum": that over its sum of those that
            were chosen; "softmax": its softmax over those.
        dtype: of the weights; None: float32.

    Returns:
        Weights [T, top_k], computed in float32, and experts [T, top_k] int64, the highest first.

    Raises:
        ValueError: shapes, dtypes or `weights` do not fit.
    """
    wide = dtype or torch.float32
    few = scores.shape[1] <= MOST_EXPERTS and top_k <= MOST_CHOSEN
    if few and scores.shape[0] > 0 and is_measured(scores.device) and scores.stride(1) == 1:
        from attn_ops.ops.triton.top_experts import launch_top_experts

        return launch_top_experts(scores, top_k, softmax, weights, wide)
    given = scores.to(torch.promote_types(scores.dtype, torch.float32))
    given = given.softmax(-1) if softmax else given
    values, ids = given.sort(dim=-1, descending=True, stable=True)
    values = values[:, :top_k]
    if weights == "sum":
        values = values / values.sum(-1, keepdim=True)
    elif weights == "softmax":
        values = values.softmax(-1)
    return values.to(wide).contiguous(), ids[:, :top_k].contiguous()
