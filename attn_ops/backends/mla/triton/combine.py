"""Parts of split keys merged into latents, weighted by their log-sum-exp.

D rows, N query heads, R ranges, L columns of a program, C ranges merged at a time, M rows.
"""

import torch
import triton
import triton.language as tl

from attn_ops.backends.triton.tiles import LN_2
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2

VALUES = 8192
"""Loaded at a time: 64 registers of a thread. Each further time is one more wait for memory."""


@triton.jit
def merged_parts(
    part_ptr,
    part_lse_ptr,
    place_M,  # of a row's first range
    mask_M,
    l_L,  # columns
    num_splits,
    LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_L: tl.constexpr,
    PARTS: tl.constexpr,  # C
):
    """out_ML and lse_M, base 2, float32. Ranges without keys are not read.

    Loads bypass the first-level cache, which another multiprocessor's stores do not reach.
    """
    c_C = tl.arange(0, PARTS)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ML = tl.zeros([BLOCK_M, TILE_L], tl.float32)
    for first in range(0, num_splits, PARTS):
        place_MC = (place_M + first)[:, None] + c_C[None, :]
        lse_MC = tl.load(
            part_lse_ptr + place_MC,
            mask=mask_M[:, None] & (first + c_C < num_splits)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        part_MCL = tl.load(
            part_ptr + (place_MC * LATENT)[:, :, None] + l_L[None, None, :],
            mask=(lse_MC > float("-inf"))[:, :, None] & (l_L < LATENT)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top_M = tl.maximum(top_M, tl.max(lse_MC, 1))
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
        weight_MC = tl.exp2(lse_MC - base_M[:, None])
        rescale_M = tl.exp2(top_M - base_M)
        total_M = total_M * rescale_M + tl.sum(weight_MC, 1)
        acc_ML = acc_ML * rescale_M[:, None] + tl.sum(weight_MC[:, :, None] * part_MCL, 1)
        top_M = new_top_M
    total_M = tl.where(total_M == 0.0, 1.0, total_M)
    return acc_ML / total_M[:, None], top_M + tl.log2(total_M)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out_ptr,  # [D, N, LATENT] contiguous
    part_ptr,  # [D, N, R, LATENT] float32 contiguous
    part_lse_ptr,  # [D, N, R] float32 contiguous, base 2
    num_splits,  # R
    lse_ptr,  # [D, N] float32 contiguous, natural log, if HAS_LSE
    LATENT: tl.constexpr,
    TILE_L: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (D * N, ceil(LATENT / TILE_L))."""
    wait_for_inputs(PDL)
    row_M = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    l_L = tl.program_id(1) * TILE_L + tl.arange(0, TILE_L)
    out_ML, lse_M = merged_parts(
        part_ptr, part_lse_ptr, row_M * num_splits, row_M >= 0, l_L, num_splits,
        LATENT, 1, TILE_L, PARTS,
    )  # fmt: skip
    tl.store(
        out_ptr + (row_M * LATENT)[:, None] + l_L[None, :],
        out_ML.to(out_ptr.dtype.element_ty),
        mask=(l_L < LATENT)[None, :],
    )
    if HAS_LSE:
        tl.store(lse_ptr + row_M, lse_M * LN_2, mask=tl.program_id(1) == 0)


def combine(
    part: torch.Tensor, part_lse: torch.Tensor, dtype: torch.dtype, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """part [D, N, R, Lkv], part_lse [D, N, R], base 2 -> [D, N, Lkv] in `dtype`; writes `lse`."""
    num_rows, num_heads, num_splits, latent = part.shape
    out = torch.empty(num_rows, num_heads, latent, dtype=dtype, device=part.device)
    columns = 64 if num_splits > 64 else 128 if num_splits > 16 else 512
    tile = min(next_power_of_2(latent), columns)
    quick(combine_kernel, (num_rows * num_heads, cdiv(latent, tile)))(
        out,
        part,
        part_lse,
        num_splits,
        out if lse is None else lse,
        LATENT=latent,
        TILE_L=tile,
        PARTS=min(next_power_of_2(num_splits), VALUES // tile),
        HAS_LSE=lse is not None,
        num_warps=4,
        **early_launch(part.device),
    )
    return out
