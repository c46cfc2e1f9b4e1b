"""Paged attention for any number of query rows per request: one kernel for a whole mixed batch.

A program owns BLOCK_Q query rows of one request and the query heads that share a kv head, stacked
as the rows of its products, so that a key tile is read once for all of them. The grid comes from
shapes alone; which request a program serves it finds in query_start_loc.

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
B block size, C keys of a tile, M rows of a program (BLOCK_Q x HEADS, padded to a power of two).
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


@triton.jit
def find_request(query_start_loc_ptr, program, num_reqs, BLOCK_Q: tl.constexpr):
    """Largest r in 0..S with query_start_loc[r] // BLOCK_Q + r <= program.

    Request r thus owns at least ceil(length / BLOCK_Q) programs, and r == S owns the
    rows behind the last request.
    """
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= program:
            low = middle
        else:
            high = middle - 1
    return low


# Batch sizes and the width of the block table change from step to step; specializing on them
# would recompile. Strides of q and the cache are geometry, and their divisibility by 16 is what
# makes loads 16 bytes wide.
@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "window"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr",
        "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
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
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,  # q in float32
):
    """Grid (T // BLOCK_Q + S + 1, K * ceil(G / HEADS))."""
    RIGHT: tl.constexpr = HAS_WINDOW and not CAUSAL
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows see most keys: they start first
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES

    # Rows behind the last request are request S, whose sequence is empty: they come out
    # zero like any empty one.
    request = find_request(query_start_loc_ptr, program, num_reqs, BLOCK_Q)
    row_begin = tl.load(query_start_loc_ptr + request)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_reqs, other=num_rows)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    query_len = row_end - row_begin
    first = (program - row_begin // BLOCK_Q - request) * BLOCK_Q
    if first >= query_len:
        return

    m_M = tl.arange(0, BLOCK_M)
    query_M = first + m_M // HEADS
    in_group_M = head_tile * HEADS + m_M % HEADS
    head_M = kv_head * GROUP + in_group_M
    row_M = (row_begin + query_M).to(tl.int64)
    owned_M = (m_M < BLOCK_Q * HEADS) & (query_M < query_len) & (in_group_M < GROUP)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    q_MH = tl.load(
        q_ptr + (row_M * stride_q_row + head_M * stride_q_head)[:, None] + h_H[None, :],
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

    # Positions of the program's first and last row bound the keys that any row sees (begin..end)
    # and those that all rows see (all_begin..all_end), which need no mask.
    context = seq_len - query_len
    position_M = context + query_M
    first_position = context + first
    last_position = context + tl.minimum(first + BLOCK_Q, query_len) - 1
    begin = 0
    all_begin = 0
    end = seq_len
    all_end = seq_len // TILE * TILE
    if CAUSAL:
        end = last_position + 1
        all_end = tl.maximum(first_position + 1, 0) // TILE * TILE
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        all_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE) * TILE
        if RIGHT:  # sums past a window of nearly 2 ** 31 would overflow
            end = last_position + tl.minimum(window, seq_len - last_position)
            all_end = first_position + tl.minimum(window, seq_len - first_position)
            all_end = tl.maximum(all_end, 0) // TILE * TILE
        all_begin = tl.minimum(all_begin, all_end)

    k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_ptr = k_ptr + stride_kv
    table_ptr += request.to(tl.int64) * stride_table
    acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
    max_M, sum_M = first_logits(sinks_ptr, head_M, owned_M & (seq_len > 0), BLOCK_M, HAS_SINKS)
    if HAS_WINDOW:
        acc_MH, max_M, sum_M = attend_tiles(
            acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_ptr, v_ptr, table_ptr, seq_len,
            begin, all_begin, stride_block, stride_token, score_scale, soft_cap, window,
            HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE,
            CAUSAL, HAS_WINDOW, RIGHT, HAS_SOFT_CAP, HAS_ALIBI, MASKED=True,
        )  # fmt: skip
    acc_MH, max_M, sum_M = attend_tiles(
        acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_ptr, v_ptr, table_ptr, seq_len,
        all_begin, all_end, stride_block, stride_token, score_scale, soft_cap, window,
        HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE,
        CAUSAL, HAS_WINDOW, RIGHT, HAS_SOFT_CAP, HAS_ALIBI, MASKED=False,
    )  # fmt: skip
    acc_MH, max_M, sum_M = attend_tiles(
        acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_ptr, v_ptr, table_ptr, seq_len,
        all_end, end, stride_block, stride_token, score_scale, soft_cap, window,
        HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE,
        CAUSAL, HAS_WINDOW, RIGHT, HAS_SOFT_CAP, HAS_ALIBI, MASKED=True,
    )  # fmt: skip
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MH = acc_MH / total_M[:, None]
    if HAS_V_SCALE:
        out_MH *= tl.load(v_scale_ptr)
    if HAS_LSE:
        lse_M = (max_M + tl.log2(total_M)) * LN_2
        tl.store(lse_ptr + row_M * NUM_HEADS + head_M, lse_M, mask=owned_M)
    out_ptr_MH = out_ptr + ((row_M * NUM_HEADS + head_M) * HEAD_SIZE)[:, None] + h_H[None, :]
    tl.store(out_ptr_MH, out_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)


def prefill_tiles(padded_head_size: int, dtype: torch.dtype, shared_bytes: int) -> Tiles:
    """Largest that the compiler keeps in registers on Hopper; the fastest is not measured."""
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return Tiles(32, 32, 4, 1) if padded_head_size <= 64 else Tiles(32, 16, 8, 1)
    if padded_head_size <= 128:
        return Tiles(128, 64, 8, 3)
    return Tiles(128 if shared_bytes >= 132 * 1024 else 64, 32, 8, 3)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on `device`; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def prefill_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous; writes `options.lse`.

    Of the batch's ints only max_query_len is read.
    """
    (num_rows, num_heads, head_size), (_, _, block_size, num_kv_heads, _) = q.shape, kv_cache.shape
    group, padded_head_size = num_heads // num_kv_heads, triton.next_power_of_2(head_size)
    tiles = prefill_tiles(padded_head_size, q.dtype, shared_memory(q.device))
    block_m = min(tiles.rows, max(16, triton.next_power_of_2(common.max_query_len * group)))
    heads = min(group, block_m)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    arguments, flags = option_arguments(options, unused=out)
    num_row_tiles = num_rows // (block_m // heads) + common.num_reqs + 1
    grid = (num_row_tiles, num_kv_heads * triton.cdiv(group, heads))
    prefill_kernel[grid](
        out,
        q,
        readable(kv_cache, options),
        common.query_start_loc,
        common.seq_lens,
        common.block_table_tensor,
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        common.block_table_tensor.stride(0),
        common.num_reqs,
        num_rows,
        *arguments,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        TILE=tiles.keys,
        CAUSAL=common.causal,
        WIDEN=widened(q.dtype),
        num_warps=tiles.num_warps if block_m == tiles.rows else 4,
        num_stages=tiles.num_stages,
        **flags,
    )
    return out
