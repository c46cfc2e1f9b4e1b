"""Queries of FLASH_ATTN in FP8, as its kernels must write them."""

import torch

LARGEST, SMALLEST_SCALE = 448.0, 2.0**-100


def reference_quantize_query(q: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_query` in PyTorch; rows from `num_rows` on are zero."""
    used = q[:num_rows].float()
    scale = _reference_scale(used.abs().where(used.isfinite(), 0.0).amax().view(1))
    out = torch.zeros(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    out[:num_rows] = (used / scale).to(torch.float8_e4m3fn)
    return out, scale


def reference_quantize_tokens(
    q: torch.Tensor, query_start_loc: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_tokens` in PyTorch; rows that are no request's are zero."""
    num_reqs = query_start_loc.shape[0] - 1
    out = torch.zeros(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    largest_SK = torch.zeros(num_reqs, num_kv_heads, device=q.device)
    lives = query_start_loc.diff() == 1
    rows = query_start_loc[:-1][lives].long()
    used_SKGH = q[rows].float().unflatten(1, (num_kv_heads, -1))
    largest_SK[lives] = used_SKGH.abs().where(used_SKGH.isfinite(), 0.0).amax((2, 3))
    scale_SK = _reference_scale(largest_SK)
    rounded = (used_SKGH / scale_SK[lives][:, :, None, None]).to(torch.float8_e4m3fn)
    out[rows] = rounded.flatten(1, 2)
    return out, scale_SK


def _reference_scale(largest: torch.Tensor) -> torch.Tensor:
    """`_scale_for` in PyTorch."""
    mantissa, exponent = torch.frexp((largest / LARGEST).clamp(min=SMALLEST_SCALE))
    return torch.exp2((exponent - (mantissa == 0.5).int()).float())
