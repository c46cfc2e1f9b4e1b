"""Latents times W_UV: parts merged and multiplied head by head, in one kernel.

D rows, N query heads, R ranges of keys, L columns of the latent (Lkv), V columns of a value,
M rows of a product (D, repeated up to 16), C ranges merged at a time.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attn_ops.backends.mla.triton.combine import combine, merged_parts
from attn_ops.backends.mla.triton.decode import Parts, mla_parts
from attn_ops.backends.mla.triton.launch import DecodeLaunch
from attn_ops.backends.triton.tiles import LN_2, widened
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2

MAX_PASSES = 2
"""Over the ranges, that `project` makes itself: each waits for memory, in every program of a head.
With more of them a kernel before it merges them once. Not measured yet."""


MIN_PROGRAMS = 128
"""Wanted, about one for each multiprocessor of an H200; values of a head are cut until then."""


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def project_kernel(
    out_ptr,  # [D, N, VALUE] contiguous
    part_ptr,  # [D, N, R, LATENT] contiguous, float32 if SPLIT
    part_lse_ptr,  # [D, N, R] float32 contiguous, base 2, if SPLIT
    w_ptr,  # [N, VALUE, LATENT]
    stride_w_head,
    stride_w_row,
    num_rows,  # D
    num_splits,  # R
    lse_ptr,  # [D, N] float32 contiguous, natural log, if HAS_LSE
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,  # TILE_L holds the latent: W_UV is loaded before the parts are there
    SPLIT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (ceil(VALUE / TILE_V), N, ceil(D / BLOCK_D))."""
    BLOCK_M: tl.constexpr = BLOCK_D if BLOCK_D > 16 else 16
    REPEATS: tl.constexpr = BLOCK_M // BLOCK_D
    value_tile = tl.program_id(0)
    head = tl.program_id(1)
    l_L = tl.arange(0, TILE_L)
    v_V = value_tile * TILE_V + tl.arange(0, TILE_V)
    w_ptr += head.to(tl.int64) * stride_w_head
    w_ptr_VL = w_ptr + (v_V * stride_w_row)[:, None] + l_L[None, :]
    stored_V = v_V < VALUE
    if WHOLE:
        w_VL = tl.load(w_ptr_VL, mask=stored_V[:, None] & (l_L < LATENT)[None, :], other=0.0)
    wait_for_inputs(PDL)
    d_D = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_D = d_D < num_rows
    row_D = d_D.to(tl.int64) * NUM_HEADS + head
    place_D = row_D * num_splits
    lse_D = tl.zeros([BLOCK_D], tl.float32)
    acc_MV = tl.zeros([BLOCK_M, TILE_V], tl.float32)
    for first in range(0, LATENT, TILE_L):
        column_L = first + l_L
        if SPLIT:
            x_DL, lse_D = merged_parts(
                part_ptr, part_lse_ptr, place_D, inside_D, column_L, num_splits,
                LATENT, BLOCK_D, TILE_L, PARTS,
            )  # fmt: skip
        else:
            x_DL = tl.load(
                part_ptr + (row_D * LATENT)[:, None] + column_L[None, :],
                mask=inside_D[:, None] & (column_L < LATENT)[None, :],
                other=0.0,
            )
        x_DL = x_DL.to(w_ptr.dtype.element_ty)
        if not WHOLE:
            mask_VL = stored_V[:, None] & (column_L < LATENT)[None, :]
            w_VL = tl.load(w_ptr_VL + first, mask=mask_VL, other=0.0)
        if REPEATS > 1:  # a product takes at least 16 rows
            x_ML = tl.reshape(
                tl.broadcast_to(x_DL[:, None, :], [BLOCK_D, REPEATS, TILE_L]), [BLOCK_M, TILE_L]
            )
        else:
            x_ML = x_DL
        if WIDEN:
            acc_MV += tl.dot(x_ML.to(tl.float32), tl.trans(w_VL.to(tl.float32)))
        else:
            acc_MV = tl.dot(x_ML, tl.trans(w_VL), acc_MV, input_precision="ieee")

    if HAS_LSE:
        tl.store(lse_ptr + row_D, lse_D * LN_2, mask=inside_D & (value_tile == 0))
    m_M = tl.arange(0, BLOCK_M)
    row_M = (tl.program_id(2) * BLOCK_D + m_M // REPEATS).to(tl.int64)
    owned_M = (row_M < num_rows) & (m_M % REPEATS == 0)
    out_ptr_MV = out_ptr + ((row_M * NUM_HEADS + head) * VALUE)[:, None] + v_V[None, :]
    mask_MV = owned_M[:, None] & stored_V[None, :]
    tl.store(out_ptr_MV, acc_MV.to(out_ptr.dtype.element_ty), mask=mask_MV)


class ProjectLaunch(NamedTuple):
    """Constants of a launch of the project kernel."""

    rows: int  # BLOCK_D
    values: int  # TILE_V
    latents: int  # TILE_L
    num_warps: int
    num_stages: int


def project_launch(
    num_rows: int, num_heads: int, latent: int, value: int, dtype: torch.dtype, num_splits: int = 1
) -> ProjectLaunch:
    """For parts of `num_splits` ranges.

    Of few rows, wider tiles of W_UV merge their ranges fewer times; without ranges to merge more
    programs are faster (one H200, 2026-11-23).
    """
    padded_latent = max(next_power_of_2(latent), 16)
    padded_value = max(next_power_of_2(value), 16)
    rows = min(next_power_of_2(num_rows), 64)
    if dtype == torch.float32:
        return ProjectLaunch(min(rows, 16), min(padded_value, 32), min(padded_latent, 32), 4, 1)
    if rows <= 16:
        wide = num_splits >= 8 if rows == 1 else 1 < num_splits and rows <= 4
        values = min(padded_value, 64 if wide else 32)
        return ProjectLaunch(rows, values, padded_latent, 8 if wide and rows > 1 else 4, 1)
    values, programs = min(padded_value, 128), num_heads * cdiv(num_rows, rows)
    while values > 16 and programs * cdiv(value, values) < MIN_PROGRAMS:
        values //= 2
    if values == 128:
        return ProjectLaunch(rows, values, min(padded_latent, 128), 8, 3)
    return ProjectLaunch(rows, values, min(padded_latent, 64 if values > 32 else 128), 4, 3)


def combine_project(
    parts: Parts,
    w_uv: torch.Tensor,
    lse: torch.Tensor | None = None,
    launch: ProjectLaunch | None = None,
    max_fused_splits: int | None = None,
) -> torch.Tensor:
    """Parts [D, N, R, Lkv] and w_uv [N, V, Lkv] -> [D, N, V] contiguous.

    Args:
        parts: of `mla_parts`.
        w_uv: strides are free but for the last.
        lse: [D, N] float32, written if there are several ranges: else `mla_parts` wrote it.
        launch: overrides the choice.
        max_fused_splits: with more ranges, a kernel before this one merges them; None: chosen.
    """
    num_rows, num_heads, num_splits, latent = parts.part.shape
    value, dtype, device = w_uv.shape[1], w_uv.dtype, w_uv.device
    chosen = launch or project_launch(num_rows, num_heads, latent, value, dtype, num_splits)
    if max_fused_splits is None:
        max_fused_splits = _fused_splits(chosen, latent)
    if parts.lse is not None and num_splits > max_fused_splits:
        merged = combine(parts.part, parts.lse, dtype, lse)
        return combine_project(Parts(merged[:, :, None], None), w_uv, None, launch)
    split = parts.lse is not None
    out = torch.empty(num_rows, num_heads, value, dtype=dtype, device=device)
    grid = (cdiv(value, chosen.values), num_heads, cdiv(num_rows, chosen.rows))
    quick(project_kernel, grid)(
        out,
        parts.part,
        parts.lse if parts.lse is not None else out,
        w_uv,
        *w_uv.stride()[:2],
        num_rows,
        num_splits,
        out if lse is None else lse,
        **_constants(chosen, num_heads, latent, value, num_splits),
        SPLIT=split,
        HAS_LSE=split and lse is not None,
        WIDEN=widened(dtype),
        **early_launch(device),
    )
    return out


def _constants(
    launch: ProjectLaunch, num_heads: int, latent: int, value: int, num_splits: int
) -> dict[str, Any]:
    """The kernel's constants that follow from sizes and the launch."""
    return {
        "NUM_HEADS": num_heads,
        "LATENT": latent,
        "VALUE": value,
        "TILE_V": launch.values,
        "TILE_L": launch.latents,
        "BLOCK_D": launch.rows,
        "PARTS": min(next_power_of_2(num_splits), _most_parts(launch)),
        "WHOLE": launch.latents >= latent,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def _fused_splits(launch: ProjectLaunch, latent: int) -> int:
    """Ranges that the kernel itself merges: one, where each tile of columns would wait for them."""
    return MAX_PASSES * _most_parts(launch) if launch.latents >= latent else 1


def _most_parts(launch: ProjectLaunch) -> int:
    """Ranges merged at a time: their values take 64 registers of a thread."""
    return max(64 * 32 * launch.num_warps // (launch.rows * launch.latents), 1)


def mla_decode_project(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    kv_scale: torch.Tensor | None = None,
    fp8: torch.dtype | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    launch: DecodeLaunch | None = None,
    project: ProjectLaunch | None = None,
) -> torch.Tensor:
    """`mla_decode`, multiplied by w_uv [N, V, Lkv]: [D, N, V]."""
    parts = mla_parts(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc,
        scale=scale, max_query_len=max_query_len, max_seq_len=max_seq_len, kv_scale=kv_scale,
        fp8=fp8, lse=lse, num_splits=num_splits, launch=launch,
    )  # fmt: skip
    return combine_project(parts, w_uv, lse, project)
