"""Paged attention for single-token queries: keys split over programs, then the parts combined.

A program owns a range of one request's own keys and the query heads that share a kv head, as the
rows of its products. How many ranges a request is cut into the host decides from shapes and
`max_seq_len`; where they lie the kernel computes from seq_lens, so a captured launch is right for
other lengths (flash decoding, Dao et al. 2023).

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
B block size, M rows of a program (HEADS, padded to a power of two), R ranges of keys.
"""

import functools

import torch
import triton
import triton.language as tl

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.tiles import (
    LN_2,
    LOG2_E,
    Tiles,
    attend_tiles,
    first_logits,
    option_arguments,
    readable,
    widened,
)
from attn_ops.metadata import CommonAttentionMetadata

PROGRAMS_PER_SM = 8
"""Wanted at least: about four fit at a time, and the last wave should be a small part of it all."""

MIN_TOKENS_PER_SPLIT = 128
"""A shorter range costs more in the combining kernel than it saves."""

MAX_SPLITS = 64
"""The combining kernel holds all parts of one head in registers."""

MAX_HEADS = 32
"""Query heads of one program; larger groups are cut."""


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_splits", "window"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr",
        "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
    part_ptr,  # [S, N, R, HEAD_SIZE] float32 contiguous, if SPLIT
    part_lse_ptr,  # [S, N, R] float32 contiguous, base 2, if SPLIT; -inf: part empty, not written
    q_ptr,  # [T, N, HEAD_SIZE]
    kv_ptr,  # [P, 2, B, K, HEAD_SIZE], in q's dtype or FP8
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, max blocks] int32
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_kv,
    stride_token,
    stride_kv_head,
    stride_table,
    num_reqs,
    num_rows,  # T
    num_splits,  # R
    score_scale,
    soft_cap,
    window,
    alibi_ptr,  # [N] float32: slopes, if HAS_ALIBI
    sinks_ptr,  # [N] float32, if HAS_SINKS
    k_scale_ptr,  # [1] float32, if HAS_K_SCALE
    v_scale_ptr,  # [1] float32, if HAS_V_SCALE
    lse_ptr,  # [T, N] float32 contiguous, natural log, if HAS_LSE
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # G
    HEADS: tl.constexpr,  # query heads per program, at most G
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,  # q in float32
    SPLIT: tl.constexpr,
):
    """Grid (max(S, T), K * ceil(G / HEADS), R)."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    m_M = tl.arange(0, BLOCK_M)
    in_group_M = tl.program_id(1) % HEAD_TILES * HEADS + m_M
    head_M = kv_head * GROUP + in_group_M
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    owned_M = (m_M < HEADS) & (in_group_M < GROUP)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    offset_MH = (head_M * HEAD_SIZE)[:, None] + h_H[None, :]

    # Row number `request` behind the last request's is padding, if the batch has so many rows.
    pad_row = tl.load(query_start_loc_ptr + num_reqs).to(tl.int64) + request
    zero_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + pad_row * NUM_HEADS * HEAD_SIZE + offset_MH,
        zero_MH,
        mask=mask_MH & (pad_row < num_rows) & (split == 0),
    )
    if HAS_LSE:
        tl.store(
            lse_ptr + pad_row * NUM_HEADS + head_M,
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            mask=owned_M & (pad_row < num_rows) & (split == 0),
        )
    if request >= num_reqs:
        return
    row = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) <= row:
        return

    seq_len = tl.load(seq_lens_ptr + request)
    visible_begin = 0
    if HAS_WINDOW:
        visible_begin = tl.maximum(seq_len - window, 0) // TILE * TILE
    split_len = tl.cdiv(tl.cdiv(seq_len - visible_begin, num_splits), TILE) * TILE
    begin = visible_begin + split * split_len
    end = tl.minimum(begin + split_len, seq_len)

    q_MH = tl.load(
        q_ptr + row * stride_q_row + (head_M * stride_q_head)[:, None] + h_H[None, :],
        mask=mask_MH,
        other=0.0,
    )
    if WIDEN:
        q_MH = q_MH.to(tl.float32)
    if HAS_K_SCALE:
        score_scale *= tl.load(k_scale_ptr)
    slope_M = 0.0
    if HAS_ALIBI:
        slope_M = tl.load(alibi_ptr + head_M, mask=owned_M, other=0.0) * LOG2_E
    # The first range counts the sink. It holds a key, if the request does.
    counted_M = owned_M & (split == 0) & (seq_len > 0)
    max_M, sum_M = first_logits(sinks_ptr, head_M, counted_M, BLOCK_M, HAS_SINKS)
    position_M = seq_len - 1 + tl.zeros([BLOCK_M], tl.int32)
    k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
    table_ptr += request.to(tl.int64) * stride_table
    acc_MH, max_M, sum_M = attend_tiles(
        tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32), max_M, sum_M, q_MH, position_M, slope_M,
        k_ptr, k_ptr + stride_kv, table_ptr, seq_len, begin, end,
        stride_block, stride_token, score_scale, soft_cap, window,
        HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE,
        False, HAS_WINDOW, False, HAS_SOFT_CAP, HAS_ALIBI, MASKED=True,
    )  # fmt: skip
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    result_MH = acc_MH / total_M[:, None]
    if HAS_V_SCALE:
        result_MH *= tl.load(v_scale_ptr)
    if SPLIT:
        part_M = (request.to(tl.int64) * NUM_HEADS + head_M) * num_splits + split
        part_ptr_MH = part_ptr + (part_M * HEAD_SIZE)[:, None] + h_H[None, :]
        tl.store(part_ptr_MH, result_MH, mask=mask_MH & (begin < end))
        tl.store(part_lse_ptr + part_M, max_M + tl.log2(total_M), mask=owned_M)
    else:
        out_ptr_MH = out_ptr + row * NUM_HEADS * HEAD_SIZE + offset_MH
        tl.store(out_ptr_MH, result_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)
        if HAS_LSE:
            lse_M = (max_M + tl.log2(total_M)) * LN_2
            tl.store(lse_ptr + row * NUM_HEADS + head_M, lse_M, mask=owned_M)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "lse_ptr"],
)
def combine_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
    part_ptr,  # [S, N, R, HEAD_SIZE] float32 contiguous
    part_lse_ptr,  # [S, N, R] float32 contiguous, base 2
    query_start_loc_ptr,  # [S + 1] int32
    num_splits,  # R
    lse_ptr,  # [T, N] float32 contiguous, natural log, if HAS_LSE
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Grid (S, N): weights the parts of one row and head by their log-sum-exp."""
    request = tl.program_id(0)
    row = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) <= row:
        return
    r_R = tl.arange(0, PADDED_SPLITS)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    part = (request.to(tl.int64) * NUM_HEADS + tl.program_id(1)) * num_splits
    lse_R = tl.load(part_lse_ptr + part + r_R, mask=r_R < num_splits, other=float("-inf"))
    written_R = lse_R != float("-inf")
    top = tl.max(lse_R, 0)
    weight_R = tl.where(written_R, tl.exp2(lse_R - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    part_RH = tl.load(
        part_ptr + ((part + r_R) * HEAD_SIZE)[:, None] + h_H[None, :],
        mask=written_R[:, None] & (h_H < HEAD_SIZE)[None, :],
        other=0.0,
    )
    total = tl.sum(weight_R, 0)
    out_H = tl.sum(part_RH * weight_R[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptr_H = out_ptr + (row * NUM_HEADS + tl.program_id(1)) * HEAD_SIZE + h_H
    tl.store(out_ptr_H, out_H.to(out_ptr.dtype.element_ty), mask=h_H < HEAD_SIZE)
    if HAS_LSE:  # of a row without keys top is -inf already
        lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2
        tl.store(lse_ptr + row * NUM_HEADS + tl.program_id(1), lse)


def decode_tiles(padded_head_size: int, dtype: torch.dtype) -> Tiles:
    """Small enough that several programs of an SM load at a time; the fastest is not measured."""
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return Tiles(MAX_HEADS, 32, 4, 1) if padded_head_size <= 64 else Tiles(MAX_HEADS, 16, 8, 1)
    return Tiles(MAX_HEADS, 64 if padded_head_size <= 128 else 32, 4, 3)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of `device`; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_num_splits(num_programs: int, max_keys: int, multiprocessors: int) -> int:
    """Ranges per request, from host values that a captured graph may freeze.

    Args:
        num_programs: programs without splitting.
        max_keys: most keys that a query sees, or an upper bound.
        multiprocessors: of the device.
    """
    wanted = triton.cdiv(PROGRAMS_PER_SM * multiprocessors, max(num_programs, 1))
    return max(1, min(wanted, triton.cdiv(max_keys, MIN_TOKENS_PER_SPLIT), MAX_SPLITS))


def decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    num_splits: int | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous; writes `options.lse`.

    No query of the batch is longer than one token: it is its request's last, so that
    `common.causal` makes no difference. `num_splits` overrides the choice, 1 to MAX_SPLITS.
    """
    (num_rows, num_heads, head_size), (_, _, block_size, num_kv_heads, _) = q.shape, kv_cache.shape
    num_reqs, group = common.num_reqs, num_heads // num_kv_heads
    padded_head_size = triton.next_power_of_2(head_size)
    tiles = decode_tiles(padded_head_size, q.dtype)
    heads = min(group, tiles.rows)
    head_tiles = num_kv_heads * triton.cdiv(group, heads)
    if num_splits is None:
        max_keys = min(common.max_seq_len, options.sliding_window or common.max_seq_len)
        num_splits = choose_num_splits(num_reqs * head_tiles, max_keys, num_sms(q.device))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part, part_lse = _parts(out, num_reqs, num_splits)
    arguments, flags = option_arguments(options, unused=out)
    decode_kernel[(max(num_reqs, num_rows), head_tiles, num_splits)](
        out,
        part,
        part_lse,
        q,
        readable(kv_cache, options),
        common.query_start_loc,
        common.seq_lens,
        common.block_table_tensor,
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        common.block_table_tensor.stride(0),
        num_reqs,
        num_rows,
        num_splits,
        *arguments,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(heads)),
        TILE=tiles.keys,
        WIDEN=widened(q.dtype),
        SPLIT=num_splits > 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **flags,
    )
    if num_splits > 1 and num_reqs:
        _combine(out, part, part_lse, common, options.lse)
    return out


def _parts(out: torch.Tensor, num_reqs: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """part [S, N, R, H] and part_lse [S, N, R], float32; stand-ins if there is but one range."""
    if num_splits == 1:
        return out, out
    shape = (num_reqs, out.shape[1], num_splits)
    part = torch.empty(*shape, out.shape[2], dtype=torch.float32, device=out.device)
    return part, torch.empty(shape, dtype=torch.float32, device=out.device)


def _combine(
    out: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    common: CommonAttentionMetadata,
    lse: torch.Tensor | None,
) -> None:
    """part [S, N, R, H] and part_lse [S, N, R] into the requests' rows of out [T, N, H] and lse."""
    num_reqs, num_heads, num_splits, head_size = part.shape
    combine_kernel[(num_reqs, num_heads)](
        out,
        part,
        part_lse,
        common.query_start_loc,
        num_splits,
        out if lse is None else lse,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        PADDED_SPLITS=triton.next_power_of_2(num_splits),
        HAS_LSE=lse is not None,
        num_warps=4,
    )
