"""Paged attention for any number of query rows per request: one kernel for a whole mixed batch.

A program owns BLOCK_Q query rows of one request and the query heads that share a kv head, stacked
as the rows of its products, so that a key tile is read once for all of them. The grid comes from
shapes alone; which request a program serves it finds in query_start_loc.

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
B block size, C keys of a tile, M rows of a program (BLOCK_Q x HEADS, padded to a power of two).
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.metadata import CommonAttentionMetadata


@triton.jit
def attend_tiles(
    acc_MH,
    max_M,
    sum_M,
    q_MH,  # its dtype is that of the products
    position_M,  # of each row in its sequence
    k_ptr,  # of this kv head, at physical block 0
    v_ptr,
    table_ptr,  # the request's row of the block table
    seq_len,
    begin,  # keys begin..end are visited; begin is a multiple of TILE
    end,
    stride_block,
    stride_token,
    score_scale,
    soft_cap,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,  # False: the caller knows that every row sees every key of begin..end
):
    """Streaming softmax over key tiles, base 2, float32: acc_MH (not normalized), max_M, sum_M."""
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    if HEAD_SIZE == PADDED_HEAD_SIZE:  # a constant mask: the load is then unpredicated
        stored_H = tl.full([PADDED_HEAD_SIZE], 1, tl.int1)
    else:
        stored_H = h_H < HEAD_SIZE
    for start in range(begin, end, TILE):
        key_C = start + tl.arange(0, TILE)
        # Slots past seq_len may hold NaN, which a zero weight would not
        # silence: they are never loaded.
        if MASKED:
            valid_C = key_C < seq_len
        else:
            valid_C = tl.full([TILE], 1, tl.int1)
        block_C = tl.load(table_ptr + key_C // BLOCK_SIZE, mask=valid_C, other=0)
        offset_C = block_C.to(tl.int64) * stride_block + (key_C % BLOCK_SIZE) * stride_token
        k_HC = tl.load(
            k_ptr + offset_C[None, :] + h_H[:, None],
            mask=valid_C[None, :] & stored_H[:, None],
            other=0.0,
        )
        score_MC = tl.dot(q_MH, k_HC.to(q_MH.dtype), input_precision="ieee") * score_scale
        if HAS_SOFT_CAP:  # soft_cap * tanh(x); score_scale holds 2 * log2(e) of tanh's exponential
            score_MC = soft_cap * (1.0 - 2.0 / (tl.exp2(score_MC) + 1.0))
        if MASKED:
            visible_MC = valid_C[None, :]
            if CAUSAL:
                visible_MC = visible_MC & (key_C[None, :] <= position_M[:, None])
            if HAS_WINDOW:
                visible_MC = visible_MC & (key_C[None, :] > position_M[:, None] - window)
            score_MC = tl.where(visible_MC, score_MC, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MC = tl.exp2(score_MC - base_M[:, None])
        rescale_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_MC, 1)
        v_CH = tl.load(
            v_ptr + offset_C[:, None] + h_H[None, :],
            mask=valid_C[:, None] & stored_H[None, :],
            other=0.0,
        )
        weight_MC = weight_MC.to(v_CH.dtype).to(q_MH.dtype)
        acc_MH = tl.dot(
            weight_MC, v_CH.to(q_MH.dtype), acc_MH * rescale_M[:, None], input_precision="ieee"
        )
        max_M = new_max_M
    return acc_MH, max_M, sum_M


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
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "table_ptr"],
)
def prefill_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
    q_ptr,  # [T, N, HEAD_SIZE]
    kv_ptr,  # [P, 2, B, K, HEAD_SIZE]
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
    WIDEN: tl.constexpr,  # q in float32
):
    """Grid (T // BLOCK_Q + S + 1, K * ceil(G / HEADS))."""
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
        all_begin = tl.minimum(all_begin, all_end)

    k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_ptr = k_ptr + stride_kv
    table_ptr += request.to(tl.int64) * stride_table
    acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        acc_MH, max_M, sum_M = attend_tiles(
            acc_MH, max_M, sum_M, q_MH, position_M, k_ptr, v_ptr, table_ptr, seq_len,
            begin, all_begin, stride_block, stride_token, score_scale, soft_cap, window, HEAD_SIZE,
            PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, MASKED=True,
        )  # fmt: skip
    acc_MH, max_M, sum_M = attend_tiles(
        acc_MH, max_M, sum_M, q_MH, position_M, k_ptr, v_ptr, table_ptr, seq_len,
        all_begin, all_end, stride_block, stride_token, score_scale, soft_cap, window, HEAD_SIZE,
        PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, MASKED=False,
    )  # fmt: skip
    acc_MH, max_M, sum_M = attend_tiles(
        acc_MH, max_M, sum_M, q_MH, position_M, k_ptr, v_ptr, table_ptr, seq_len,
        all_end, end, stride_block, stride_token, score_scale, soft_cap, window, HEAD_SIZE,
        PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, CAUSAL, HAS_WINDOW, HAS_SOFT_CAP, MASKED=True,
    )  # fmt: skip
    out_MH = acc_MH / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    out_ptr_MH = out_ptr + ((row_M * NUM_HEADS + head_M) * HEAD_SIZE)[:, None] + h_H[None, :]
    tl.store(out_ptr_MH, out_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)


class Tiles(NamedTuple):
    """Constants of a launch."""

    rows: int  # most rows of a program
    keys: int  # keys of a tile
    num_warps: int
    num_stages: int


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


def score_constants(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(score_scale, soft_cap) as `attend_tiles` reads them.

    Exponentials are base 2, and tanh(x) is 1 - 2 / (exp2(2 x log2 e) + 1).
    """
    log2_e = math.log2(math.e)
    if soft_cap is None:
        return scale * log2_e, 0.0
    return 2.0 * log2_e * scale / soft_cap, soft_cap * log2_e


def widened(dtype: torch.dtype) -> bool:
    """Whether products must be float32: the interpreter multiplies bfloat16 as stored integers."""
    return dtype == torch.bfloat16 and knobs.runtime.interpret


def prefill_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous.

    Of the batch's ints only max_query_len is read.
    """
    (num_rows, num_heads, head_size), (_, _, block_size, num_kv_heads, _) = q.shape, kv_cache.shape
    group, padded_head_size = num_heads // num_kv_heads, triton.next_power_of_2(head_size)
    tiles = prefill_tiles(padded_head_size, q.dtype, shared_memory(q.device))
    block_m = min(tiles.rows, max(16, triton.next_power_of_2(common.max_query_len * group)))
    heads = min(group, block_m)
    score_scale, cap = score_constants(scale, soft_cap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_row_tiles = num_rows // (block_m // heads) + common.num_reqs + 1
    grid = (num_row_tiles, num_kv_heads * triton.cdiv(group, heads))
    prefill_kernel[grid](
        out,
        q,
        kv_cache,
        common.query_start_loc,
        common.seq_lens,
        common.block_table_tensor,
        *q.stride()[:2],
        *kv_cache.stride()[:4],
        common.block_table_tensor.stride(0),
        common.num_reqs,
        num_rows,
        score_scale,
        cap,
        sliding_window or 0,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        TILE=tiles.keys,
        CAUSAL=common.causal,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        WIDEN=widened(q.dtype),
        num_warps=tiles.num_warps if block_m == tiles.rows else 4,
        num_stages=tiles.num_stages,
    )
    return out
