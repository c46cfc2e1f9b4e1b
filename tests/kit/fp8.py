"""Weights of experts in FP8, with scales of every kind that `attn_ops::experts` takes."""

import torch

KINDS = ("row", "expert", "half", "block", "row of blocks")
"""What shares a scale: of "half", the rows of a gate, and those of up."""


def in_fp8(
    w: torch.Tensor, kind: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, M, K] in FP8, and random scales [E, R, C] of theirs; of a NaN expert NaN too."""
    e, m, k = w.shape
    columns = -(-k // 128) if "block" in kind else 1
    rows = {"expert": 1, "half": 2, "block": -(-m // 128)}.get(kind, m)
    scale = torch.rand(e, rows, columns, generator=generator, device=generator.device) + 0.5
    scale[w[:, 0, 0].isnan().to(scale.device)] = float("nan")
    return w.to(torch.float8_e4m3fn), scale.to(w.device)


def scaled(w: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Weights [E, M, K] times their scales, element by element, in float64."""
    rows = {"expert": w.shape[1], "half": w.shape[1] // 2, "block": 128}.get(kind, 1)
    columns = 128 if "block" in kind else w.shape[2]
    m, k = (torch.arange(n, device=w.device) for n in w.shape[1:])
    return w.double() * scale.double()[:, m // rows][:, :, k // columns]
