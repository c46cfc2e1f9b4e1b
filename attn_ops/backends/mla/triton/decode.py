"""Latent attention of few query rows per request: heads share one key, keys are split.

All heads attend to the same latents, so a program's rows are heads, and query tokens where a
request has several. A request's keys are cut into ranges, one program each, whose results
`combine` or `project` merges. How many ranges the host decides from shapes and `max_seq_len`;
where they lie the kernel computes from seq_lens, so a captured launch is right for other lengths.

D rows of q, S requests, N query heads, M rows of a program (pairs of token and head), R ranges of
keys, H half of the latent (Lkv) padded to a power of two, E rotated columns padded likewise, B
block size.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.backends.mla.triton.combine import combine
from attn_ops.backends.mla.triton.decode_loop import attend_latents
from attn_ops.backends.mla.triton.launch import (
    DecodeLaunch,
    choose_num_splits,
    decode_launch,
    has_room,
)
from attn_ops.backends.triton.tiles import LN_2, LOG2_E, num_sms, widened
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "row_tiles", "num_splits"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "kv_scale_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    part_ptr,  # [D, N, R, LATENT] contiguous
    part_lse_ptr,  # [D, N, R] float32 contiguous, base 2, natural log if NATURAL; if HAS_LSE
    q_latent_ptr,  # [D, N, LATENT]
    q_rope_ptr,  # [D, N, ROPE]
    kv_ptr,  # [P, B, LATENT + ROPE], in q's dtype or FP8
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, max blocks] int32
    stride_latent_row,
    stride_latent_head,
    stride_rope_row,
    stride_rope_head,
    stride_block,
    stride_token,
    stride_table,
    num_reqs,
    num_rows,  # D
    row_tiles,  # programs per request and range
    num_splits,  # R
    score_scale,
    kv_scale_ptr,  # [1] float32, if HAS_KV_SCALE
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HALF_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,  # divides every stride of the cache
    DRAFTS: tl.constexpr,  # requests may have several query tokens
    HAS_KV_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    NATURAL: tl.constexpr,
    WIDEN: tl.constexpr,  # q in float32
    HALF: tl.constexpr,  # q in float16, which FP8 converts to in one instruction
    STAGED: tl.constexpr,  # FP8 values pass through registers
    SWAP: tl.constexpr,
    CHAINS: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (max(S * row_tiles, ceil(D * N / M)), R)."""
    program = tl.program_id(0)
    request = program // row_tiles
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    m_M = tl.arange(0, BLOCK_M)
    h_H = tl.arange(0, HALF_LATENT)
    e_E = tl.arange(0, PADDED_ROPE)
    # All four at once: they are the first of a chain of loads that wait for each other.
    known = request < num_reqs
    num_used = tl.load(query_start_loc_ptr + num_reqs).to(tl.int64)
    row_begin = tl.load(query_start_loc_ptr + request, mask=known, other=0).to(tl.int64)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=known, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request, mask=known, other=0)

    # Rows behind the last request's are padding; programs share them in turn.
    pad_M = num_used * NUM_HEADS + program.to(tl.int64) * BLOCK_M + m_M
    if num_used * NUM_HEADS + program.to(tl.int64) * BLOCK_M < num_rows * NUM_HEADS:
        padding_M = pad_M < num_rows.to(tl.int64) * NUM_HEADS
        place_M = pad_M * num_splits + split
        store_nothing(
            part_ptr, part_lse_ptr, place_M, padding_M, h_H,
            LATENT, HALF_LATENT, BLOCK_M, num_splits, HAS_LSE,
        )  # fmt: skip

    query_len = (row_end - row_begin).to(tl.int32)
    flat_M = program % row_tiles * BLOCK_M + m_M
    query_M = flat_M // NUM_HEADS
    head_M = flat_M % NUM_HEADS
    owned_M = query_M < query_len
    if program % row_tiles * BLOCK_M >= query_len * NUM_HEADS:
        return
    row_M = row_begin + query_M
    place_M = (row_M * NUM_HEADS + head_M) * num_splits + split

    # Ranges are whole tiles of the request's keys; the last token of the program sees most.
    length = tl.maximum(tl.cdiv(tl.cdiv(seq_len, num_splits), TILE), 1) * TILE
    begin = split * length
    visible_M = seq_len - query_len + query_M + 1
    end = tl.minimum(begin + length, seq_len)
    if DRAFTS:
        last_query = tl.minimum((program % row_tiles + 1) * BLOCK_M - 1, query_len * NUM_HEADS - 1)
        end = tl.minimum(end, seq_len - query_len + last_query // NUM_HEADS + 1)
    if begin >= end:
        store_nothing(
            part_ptr, part_lse_ptr, place_M, owned_M, h_H,
            LATENT, HALF_LATENT, BLOCK_M, num_splits, HAS_LSE,
        )  # fmt: skip
        return

    q_row_M = row_M * stride_latent_row + head_M * stride_latent_head
    q_ptr_MH = q_latent_ptr + q_row_M[:, None] + h_H[None, :]
    mask_M0 = owned_M[:, None] & (h_H < LATENT)[None, :]
    mask_M1 = owned_M[:, None] & (HALF_LATENT + h_H < LATENT)[None, :]
    q_M0 = tl.load(q_ptr_MH, mask=mask_M0, other=0.0)
    q_M1 = tl.load(q_ptr_MH + HALF_LATENT, mask=mask_M1, other=0.0)
    q_ME = tl.load(
        q_rope_ptr + (row_M * stride_rope_row + head_M * stride_rope_head)[:, None] + e_E[None, :],
        mask=owned_M[:, None] & (e_E < ROPE)[None, :],
        other=0.0,
    )
    if WIDEN:
        q_M0, q_M1, q_ME = q_M0.to(tl.float32), q_M1.to(tl.float32), q_ME.to(tl.float32)
    kv_scale = 1.0
    if HAS_KV_SCALE:
        kv_scale = tl.load(kv_scale_ptr)
    scale_M = score_scale * kv_scale + tl.zeros([BLOCK_M], tl.float32)
    if HALF:  # rows are brought to at most 1, as bfloat16 reaches further than float16
        largest_M = tl.maximum(largest_of(q_M0), tl.maximum(largest_of(q_M1), largest_of(q_ME)))
        largest_M = tl.where(largest_M == 0.0, 1.0, largest_M)
        q_M0 = (q_M0.to(tl.float32) / largest_M[:, None]).to(tl.float16)
        q_M1 = (q_M1.to(tl.float32) / largest_M[:, None]).to(tl.float16)
        q_ME = (q_ME.to(tl.float32) / largest_M[:, None]).to(tl.float16)
        scale_M *= largest_M
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if SWAP:
        acc0 = tl.zeros([HALF_LATENT, BLOCK_M], tl.float32)
    else:
        acc0 = tl.zeros([BLOCK_M, HALF_LATENT], tl.float32)
    table_ptr += request.to(tl.int64) * stride_table
    acc0, acc1, max_M, sum_M = attend_latents(
        acc0, acc0, max_M, sum_M, q_M0, q_M1, q_ME, kv_ptr, table_ptr, visible_M, seq_len - 1,
        begin, end, stride_block, stride_token, scale_M, LATENT, HALF_LATENT, ROPE, PADDED_ROPE,
        BLOCK_SIZE, TILE, VECTOR, DRAFTS, STAGED, SWAP, CHAINS,
        SWAP or BLOCK_M < 64,
    )  # fmt: skip
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    if HAS_LSE:
        lse_M = max_M + tl.log2(total_M)
        if NATURAL:
            lse_M *= LN_2
        tl.store(part_lse_ptr + place_M, lse_M, mask=owned_M)
    factor_M = kv_scale / total_M
    if SWAP:
        acc0, acc1 = tl.trans(acc0 * factor_M[None, :]), tl.trans(acc1 * factor_M[None, :])
    else:
        acc0, acc1 = acc0 * factor_M[:, None], acc1 * factor_M[:, None]
    part_ptr_MH = part_ptr + (place_M * LATENT)[:, None] + h_H[None, :]
    tl.store(part_ptr_MH, acc0.to(part_ptr.dtype.element_ty), mask=mask_M0)
    tl.store(part_ptr_MH + HALF_LATENT, acc1.to(part_ptr.dtype.element_ty), mask=mask_M1)


@triton.jit
def largest_of(q_MH):
    """Largest magnitude of each row, float32."""
    return tl.max(tl.abs(q_MH.to(tl.float32)), 1)


@triton.jit
def store_nothing(
    part_ptr,
    part_lse_ptr,
    place_M,
    mask_M,
    h_H,
    LATENT: tl.constexpr,
    HALF_LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    num_splits,
    HAS_LSE: tl.constexpr,
):
    """Parts without keys: their log-sum-exp says so; where a part is the result, it is zero."""
    if HAS_LSE:
        none_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(part_lse_ptr + place_M, none_M, mask=mask_M)
    if num_splits == 1:
        zero_MH = tl.zeros([BLOCK_M, HALF_LATENT], part_ptr.dtype.element_ty)
        part_ptr_MH = part_ptr + (place_M * LATENT)[:, None] + h_H[None, :]
        for first in tl.static_range(0, 2 * HALF_LATENT, HALF_LATENT):
            mask_MH = mask_M[:, None] & (first + h_H < LATENT)[None, :]
            tl.store(part_ptr_MH + first, zero_MH, mask=mask_MH)


class Parts(NamedTuple):
    """What the decode kernel leaves."""

    part: torch.Tensor  # [D, N, R, Lkv] contiguous; float32, q's dtype if R is 1
    lse: torch.Tensor | None  # [D, N, R] float32, base 2; None if R is 1


def mla_parts(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    kv_scale: torch.Tensor | None = None,
    fp8: torch.dtype | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    launch: DecodeLaunch | None = None,
) -> Parts:
    """The decode kernel alone; arguments of `mla_decode`.

    Args:
        lse: [D, N] float32, written if there is but one range: else the merging kernel knows it.
    """
    (num_rows, num_heads, latent), num_reqs = ql_nope.shape, seq_lens.shape[0]
    launch, row_tiles, num_splits = _ranges(
        ql_nope, num_reqs, max_query_len, max_seq_len, fp8, num_splits, launch
    )
    split = num_splits > 1
    dtype = torch.float32 if split else ql_nope.dtype
    shape = (num_rows, num_heads, num_splits)
    part = torch.empty(*shape, latent, dtype=dtype, device=ql_nope.device)
    part_lse = torch.empty(shape, dtype=torch.float32, device=part.device) if split else lse
    grid = max(num_reqs * row_tiles, cdiv(num_rows * num_heads, launch.rows))
    quick(decode_kernel, (grid, num_splits))(
        part,
        part if part_lse is None else part_lse,
        ql_nope,
        q_pe,
        kv_cache if fp8 is None else kv_cache.view(fp8),
        query_start_loc,
        seq_lens,
        block_table,
        *ql_nope.stride()[:2],
        *q_pe.stride()[:2],
        *kv_cache.stride()[:2],
        block_table.stride(0),
        num_reqs,
        num_rows,
        row_tiles,
        num_splits,
        scale * LOG2_E.value,
        part if kv_scale is None else kv_scale,
        **_constants(ql_nope, q_pe, kv_cache, launch, fp8),
        DRAFTS=max_query_len > 1,
        HAS_KV_SCALE=fp8 is not None and kv_scale is not None,
        HAS_LSE=part_lse is not None,
        NATURAL=not split,
        **early_launch(ql_nope.device),
    )
    return Parts(part, part_lse if split else None)


def _ranges(
    ql_nope: torch.Tensor,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    fp8: torch.dtype | None,
    num_splits: int | None,
    launch: DecodeLaunch | None,
) -> tuple[DecodeLaunch, int, int]:
    """The launch, programs over the rows of a request, and ranges of its keys."""
    _, num_heads, latent = ql_nope.shape
    rows = max(max_query_len, 1) * num_heads
    sms = num_sms(ql_nope.device)
    small = num_reqs > sms or not has_room(ql_nope.device)
    launch = launch or decode_launch(rows, ql_nope.dtype, fp8 is not None, latent, small)
    row_tiles = cdiv(rows, launch.rows)
    if num_splits is None:
        slots = launch.programs_per_sm * sms
        num_splits = choose_num_splits(num_reqs * row_tiles, max_seq_len, slots)
    return launch, row_tiles, num_splits


def _constants(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    launch: DecodeLaunch,
    fp8: torch.dtype | None,
) -> dict[str, Any]:
    """The kernel's constants that follow from shapes, strides, dtypes and the launch."""
    latent, rope, dtype = ql_nope.shape[2], q_pe.shape[2], ql_nope.dtype
    half = fp8 is not None and dtype == torch.bfloat16
    return {
        "NUM_HEADS": ql_nope.shape[1],
        "LATENT": latent,
        "HALF_LATENT": max(next_power_of_2(latent) // 2, 16),
        "ROPE": rope,
        "PADDED_ROPE": max(next_power_of_2(rope), 16),
        "BLOCK_SIZE": kv_cache.shape[1],
        "BLOCK_M": launch.rows,
        "TILE": launch.keys,
        "VECTOR": math.gcd(16, *kv_cache.stride()[:2]),
        "WIDEN": widened(dtype) and not half,
        "HALF": half,
        "STAGED": fp8 is not None and dtype != torch.float32 and not knobs.runtime.interpret,
        "SWAP": launch.swap,
        "CHAINS": launch.chains,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def mla_decode(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    kv_scale: torch.Tensor | None = None,
    fp8: torch.dtype | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    launch: DecodeLaunch | None = None,
) -> torch.Tensor:
    """Latents weighted by attention, [D, N, Lkv] contiguous, in q's dtype.

    A request's rows are its last tokens; each sees the keys up to its own. Rows without keys, and
    those behind the last request's, become zero, with log-sum-exp -inf.

    Args:
        ql_nope: [D, N, Lkv], q through W_UK; strides are free but for the last.
        q_pe: [D, N, R], rotated, strides as ql_nope's.
        kv_cache: [P, B, Lkv + R], in q's dtype, or uint8 for FP8.
        block_table: [S, max blocks] int32.
        seq_lens: [S] int32, the rows' own tokens included.
        query_start_loc: [S + 1] int32, cumulative.
        scale: factor on scores.
        max_query_len: most rows of a request.
        max_seq_len: bounds seq_lens; a captured launch is right beyond it, but slower.
        kv_scale: [1] float32: an FP8 cache means stored * kv_scale; None: 1.
        fp8: dtype of an FP8 cache.
        lse: [D, N] float32, written: natural log of the softmax's denominator.
        num_splits: ranges of keys, overrides the choice; 1 to MAX_SPLITS.
        launch: overrides the choice.
    """
    parts = mla_parts(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc,
        scale=scale, max_query_len=max_query_len, max_seq_len=max_seq_len, kv_scale=kv_scale,
        fp8=fp8, lse=lse, num_splits=num_splits, launch=launch,
    )  # fmt: skip
    if parts.lse is None:
        return parts.part[:, :, 0]
    return combine(parts.part, parts.lse, ql_nope.dtype, lse)
