"""q through W_UK, head by head, launched early: beside `torch.bmm`, for few rows.

It is set up while the kernel before still runs, and reads nothing of it before that has ended.

D rows, N heads, P columns of q without RoPE, L columns of the latent, M rows of a product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_ops.backends.triton.tiles import widened
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_rows"])
def absorb_kernel(
    out_ptr,  # [D, N, LATENT] contiguous
    q_ptr,  # [D, N, NOPE]
    w_ptr,  # [N, NOPE, LATENT]
    stride_q_row,
    stride_q_head,
    stride_w_head,
    stride_w_row,
    num_rows,  # D
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    TILE_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(LATENT / TILE_L), N, ceil(D / BLOCK_M))."""
    head = tl.program_id(1).to(tl.int64)
    p_P = tl.arange(0, PADDED_NOPE)
    l_L = tl.program_id(0) * TILE_L + tl.arange(0, TILE_L)
    wait_for_inputs(PDL)  # weights, too: a step may dequantize kv_b in the kernel before this one
    w_PL = tl.load(
        w_ptr + head * stride_w_head + (p_P * stride_w_row)[:, None] + l_L[None, :],
        mask=(p_P < NOPE)[:, None] & (l_L < LATENT)[None, :],
        other=0.0,
    )
    row_M = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside_M = row_M < num_rows
    q_MP = tl.load(
        q_ptr + (row_M * stride_q_row + head * stride_q_head)[:, None] + p_P[None, :],
        mask=inside_M[:, None] & (p_P < NOPE)[None, :],
        other=0.0,
    )
    if WIDEN:
        q_MP, w_PL = q_MP.to(tl.float32), w_PL.to(tl.float32)
    out_ML = tl.dot(q_MP, w_PL, input_precision="ieee")
    tl.store(
        out_ptr + ((row_M * NUM_HEADS + head) * LATENT)[:, None] + l_L[None, :],
        out_ML.to(out_ptr.dtype.element_ty),
        mask=inside_M[:, None] & (l_L < LATENT)[None, :],
    )


class AbsorbLaunch(NamedTuple):
    """Constants of a launch."""

    rows: int  # M
    latents: int  # L
    num_warps: int


def absorb_launch(num_rows: int, dtype: torch.dtype) -> AbsorbLaunch:
    """Within 8 percent of the best form (one H200, 2026-11-23)."""
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return AbsorbLaunch(16, 32, 4)
    rows = min(max(next_power_of_2(num_rows), 16), 64)
    return AbsorbLaunch(rows, 128, 4)


def absorb(
    q_nope: torch.Tensor, w_uk: torch.Tensor, launch: AbsorbLaunch | None = None
) -> torch.Tensor:
    """q_nope [D, N, P] and w_uk [N, P, Lkv] -> [D, N, Lkv] contiguous; w_uk's last stride is 1."""
    (num_rows, num_heads, nope), latent = q_nope.shape, w_uk.shape[2]
    out = torch.empty(num_rows, num_heads, latent, dtype=q_nope.dtype, device=q_nope.device)
    if num_rows == 0:
        return out
    launch = launch or absorb_launch(num_rows, q_nope.dtype)
    tile = min(launch.latents, max(next_power_of_2(latent), 16))
    grid = (cdiv(latent, tile), num_heads, cdiv(num_rows, launch.rows))
    quick(absorb_kernel, grid)(
        out,
        q_nope,
        w_uk,
        *q_nope.stride()[:2],
        *w_uk.stride()[:2],
        num_rows,
        NUM_HEADS=num_heads,
        NOPE=nope,
        PADDED_NOPE=max(next_power_of_2(nope), 16),
        LATENT=latent,
        TILE_L=tile,
        BLOCK_M=launch.rows,
        WIDEN=widened(q_nope.dtype),
        num_warps=launch.num_warps,
        **early_launch(q_nope.device),
    )
    return out
