"""Block-sparse attention for any number of query rows per request, over a paged cache.

A program owns one query head of BLOCK_Q rows, cut where blocks of the layout end: all its rows see
the blocks of one row of the layout. Listed blocks before it are whole; the last may be the rows'
own, where causality cuts. The grid comes from shapes alone.

T rows, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
P cache blocks, B cache block size, C keys of a tile, M rows of a program, R ranges of keys,
L blocks of the layout.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.prefill import (
    CHANGES_SCORES,
    PAGED,
    PAGED_TMA,
    TMA,
    Keys,
    Launch,
    attend_keys,
    choose_num_splits,
    find_request,
    gathered_keys,
    gathers,
    has_tma,
    paged_keys,
    shared_memory,
)
from attn_ops.backends.triton.prefill_parts import combine_rows, empty_row_parts, store_rows
from attn_ops.backends.triton.tiles import (
    LOG2_E,
    first_logits,
    option_arguments,
    padded_head_size,
    widened,
)
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.metadata import CommonAttentionMetadata


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_splits"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "part_lse_ptr", "starts_ptr",
        "columns_ptr", "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous; if SPLIT [T, N, R, HEAD_SIZE] float32
    part_lse_ptr,  # [T, N, R] float32 contiguous, base 2, if SPLIT
    q_ptr,  # [T, N, HEAD_SIZE]
    k_source,  # [P, B, K, HEAD_SIZE] in q's dtype or FP8; if TMA gathered
    v_source,
    k_rows,  # if PAGED_TMA: the same as descriptors of rows
    v_rows,
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, max blocks] int32
    starts_ptr,  # [N, L + 1] int32
    columns_ptr,  # int32
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_k_token,
    stride_v_token,
    stride_k_head,  # TMA: rows of a kv head
    stride_v_head,
    stride_table,  # TMA: rows of a request
    num_layout_blocks,  # L
    num_reqs,
    num_rows,  # T
    num_splits,  # R
    score_scale,
    soft_cap,
    window,  # not read
    alibi_ptr,  # [N] float32: slopes, if HAS_ALIBI
    sinks_ptr,  # [N] float32 or q's dtype, if HAS_SINKS
    k_scale_ptr,  # [1] float32, if HAS_K_SCALE
    v_scale_ptr,  # [1] float32, if HAS_V_SCALE
    lse_ptr,  # [T, N] float32 contiguous, natural log, if HAS_LSE
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # G
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # B
    SPARSE_SIZE: tl.constexpr,  # tokens of a block of the layout
    BLOCK_M: tl.constexpr,  # BLOCK_Q; it divides SPARSE_SIZE
    TILE: tl.constexpr,  # divides SPARSE_SIZE
    HAS_WINDOW: tl.constexpr,  # False
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,  # q in float32
    KEYS: tl.constexpr,  # PAGED, PAGED_TMA or TMA
    VECTOR: tl.constexpr,  # divides every stride of the keys
    AHEAD: tl.constexpr,
    FUSED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,  # order of programs: all heads of some rows before other rows
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid ((T // BLOCK_M + 2 * S + 2) * N, R)."""
    wait_for_inputs(PDL)
    num_row_tiles = tl.num_programs(0) // NUM_HEADS
    if HEADS_FIRST:
        head = tl.program_id(0) % NUM_HEADS
        row_program = tl.program_id(0) // NUM_HEADS
    else:
        head = tl.program_id(0) // num_row_tiles
        row_program = tl.program_id(0) % num_row_tiles
    program = num_row_tiles - 1 - row_program  # late rows see most keys: they start first
    kv_head = head // GROUP

    # Rows behind the last request are request S, whose sequence is empty.
    request = find_request(query_start_loc_ptr, program, num_reqs, BLOCK_M, 2)
    row_begin = tl.load(query_start_loc_ptr + request)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_reqs, other=num_rows)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    query_len = row_end - row_begin
    if KEYS == TMA:  # beyond max_seq_len the result is wrong, but of the request's own keys
        seq_len = tl.minimum(seq_len, stride_table)
    # The first program of a request has fewer rows, so that all end where blocks end.
    context = seq_len - query_len
    skipped = tl.maximum(context, 0) % BLOCK_M
    first = (program - row_begin // BLOCK_M - 2 * request) * BLOCK_M - skipped
    if (first >= query_len) | (query_len <= 0):
        return

    m_M = tl.arange(0, BLOCK_M)
    query_M = first + m_M
    head_M = head + 0 * m_M
    row_M = (row_begin + query_M).to(tl.int64)
    owned_M = (query_M >= 0) & (query_M < query_len)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    q_MH = tl.load(
        q_ptr + (row_M * stride_q_row + head * stride_q_head)[:, None] + h_H[None, :],
        mask=owned_M[:, None] & (h_H < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if WIDEN:
        q_MH = q_MH.to(tl.float32)
    if HAS_K_SCALE:
        score_scale *= tl.load(k_scale_ptr)
    slope_M = 0.0
    if HAS_ALIBI:
        slope_M = tl.load(alibi_ptr + head_M) * LOG2_E

    position_M = context + query_M
    end = tl.minimum(context + first + BLOCK_M, seq_len)  # behind the last row's own key
    own_block = tl.minimum(tl.maximum(context + first, 0) // SPARSE_SIZE, num_layout_blocks - 1)
    starts_ptr += head * (num_layout_blocks + 1) + own_block
    listed_begin = tl.load(starts_ptr)
    listed_end = tl.load(starts_ptr + 1)
    listed_end = tl.where(end > 0, listed_end, listed_begin)
    last_block = tl.load(columns_ptr + listed_end - 1, mask=listed_end > listed_begin, other=-1)
    own_begin = own_block * SPARSE_SIZE
    own_end = own_begin
    if last_block == own_block:
        own_end = end
        listed_end -= 1
    columns_ptr += listed_begin
    place = 0
    place_end = (listed_end - listed_begin) * SPARSE_SIZE
    split = tl.program_id(1)
    if SPLIT:  # a range of the whole blocks; the last has the own block, too
        split_len = tl.cdiv(tl.cdiv(place_end, num_splits), TILE) * TILE
        place = split * split_len
        place_end = tl.minimum(place + split_len, place_end)
        own_end = tl.where(split == num_splits - 1, own_end, own_begin)

    first_row = 0
    OWN_KEYS: tl.constexpr = TMA if KEYS == TMA else PAGED  # masked: what follows may be NaN
    if KEYS == TMA:
        first_row = kv_head * stride_k_head + request * stride_table
    else:
        k_source += tl.multiple_of(kv_head.to(tl.int64) * stride_k_head, VECTOR)
        v_source += tl.multiple_of(kv_head.to(tl.int64) * stride_v_head, VECTOR)
        table_ptr += request.to(tl.int64) * stride_table
    acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
    counted_M = owned_M & (split == 0) & (seq_len > 0)
    max_M, sum_M = first_logits(sinks_ptr, head_M, counted_M, BLOCK_M, HAS_SINKS)
    if KEYS == PAGED_TMA:
        acc_MH, max_M, sum_M = attend_keys(
            acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_rows, v_rows, table_ptr,
            kv_head * HEAD_SIZE, seq_len, place, place_end, 2 * BLOCK_SIZE, 0, 0,
            score_scale, soft_cap, window, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, KEYS,
            AHEAD, True, HAS_WINDOW, False, HAS_SOFT_CAP, HAS_ALIBI, FUSED, False,
            columns_ptr, SPARSE_SIZE,
        )  # fmt: skip
    else:
        acc_MH, max_M, sum_M = attend_keys(
            acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_source, v_source, table_ptr,
            first_row, seq_len, place, place_end, stride_block, stride_k_token, stride_v_token,
            score_scale, soft_cap, window, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, KEYS,
            AHEAD, True, HAS_WINDOW, False, HAS_SOFT_CAP, HAS_ALIBI, FUSED, False,
            columns_ptr, SPARSE_SIZE, VECTOR=VECTOR,
        )  # fmt: skip
    acc_MH, max_M, sum_M = attend_keys(
        acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_source, v_source, table_ptr,
        first_row, seq_len, own_begin, own_end, stride_block, stride_k_token, stride_v_token,
        score_scale, soft_cap, window, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, OWN_KEYS,
        AHEAD, True, HAS_WINDOW, False, HAS_SOFT_CAP, HAS_ALIBI, FUSED, True, STAGES=1,
        VECTOR=VECTOR,
    )  # fmt: skip
    store_rows(
        out_ptr, part_lse_ptr, lse_ptr, acc_MH, max_M, sum_M, row_M, head_M, owned_M, split,
        num_splits, v_scale_ptr, NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE,
        BLOCK_M, HAS_V_SCALE, HAS_LSE, SPLIT,
    )  # fmt: skip


def divisor(sparse_size: int, most: int) -> int:
    """The largest power of two up to `most` that divides a block of the layout."""
    return min(sparse_size & -sparse_size, most)


def readable_by_rows(kv_cache: torch.Tensor, dtype: torch.dtype, tile: int) -> bool:
    """Whether tiles of keys are boxes of rows of the cache: whole pages, tokens in order."""
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    row = num_kv_heads * head_size
    in_order = kv_cache.stride() == (2 * block_size * row, block_size * row, row, head_size, 1)
    whole = block_size % tile == 0 and head_size == padded_head_size(head_size)
    aligned = kv_cache.data_ptr() % 16 == 0 and row * kv_cache.element_size() % 16 == 0
    return in_order and whole and aligned and kv_cache.dtype == dtype


def key_rows(kv_cache: torch.Tensor, tile: int) -> list[TensorDescriptor]:
    """Keys and values as rows [.., K * H]; those of block p begin at row 2 * B * p."""
    num_blocks, _, block_size, num_kv_heads, head_size = kv_cache.shape
    row = num_kv_heads * head_size
    rows = (2 * num_blocks - 1) * block_size
    return [
        TensorDescriptor(half, [rows, row], [row, 1], [tile, head_size])
        for half in kv_cache.unbind(1)
    ]


def keys_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    launch: Launch,
    by_rows: bool | None,
) -> tuple[Keys, list[TensorDescriptor] | None]:
    """Where the kernel reads keys and values, and their rows if it reads those by TMA in place."""
    if launch.gather:
        return gathered_keys(kv_cache, common, options, q.dtype, launch.keys), None
    by_rows = has_tma(q.device) if by_rows is None else by_rows
    by_rows = by_rows and readable_by_rows(kv_cache, q.dtype, launch.keys)
    rows = key_rows(kv_cache, launch.keys) if by_rows else None
    return paged_keys(kv_cache, common, options), rows


def choose_launch(
    q: torch.Tensor, kv_cache: torch.Tensor, common: CommonAttentionMetadata, sparse_size: int
) -> Launch:
    """For q [T, N, H] and kv_cache [P, 2, B, K, H]. Not measured yet: forms of TRITON's prefill."""
    padded = padded_head_size(q.shape[2])
    if q.dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        launch = Launch(32, 32, 4, 1) if padded <= 64 else Launch(16, 16, 4, 1)
    elif padded > 256:
        launch = (
            Launch(64, 16, 8, 2) if shared_memory(q.device) >= 132 * 1024 else Launch(32, 16, 8, 1)
        )
    elif padded > 128:
        launch = Launch(64, 32, 4, 3)
    else:
        in_place = has_tma(q.device) and readable_by_rows(
            kv_cache, q.dtype, divisor(sparse_size, 64)
        )
        launch = Launch(64, 64, 4, 3, gather=not in_place and gathers(q, kv_cache, common))
    launch = launch._replace(
        rows=divisor(sparse_size, launch.rows),
        keys=divisor(sparse_size, launch.keys),
        heads=1,
        heads_first=True,
    )
    num_heads = q.shape[1]
    return launch._replace(num_splits=choose_num_splits(launch, 1, num_heads, common, q))


def prefill_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    sparse_size: int,
    layout: Sequence[torch.Tensor],
    launch: Launch | None = None,
    by_rows: bool | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous; writes `options.lse`.

    max_query_len and max_seq_len must bound the batch's lengths, in a captured launch those of
    every replay. `layout` are tensors of `BlockTables` for blocks of `sparse_size` tokens.

    Args:
        launch: overrides the choice; its rows and keys are powers of two that divide `sparse_size`.
        by_rows: overrides whether keys are read in place by TMA, where `readable_by_rows`.
    """
    launch = launch or choose_launch(q, kv_cache, common, sparse_size)
    keys, rows = keys_of(q, kv_cache, common, options, launch, by_rows)
    num_rows, num_heads, head_size = q.shape
    starts, columns, *_ = layout
    block_m, _ = launch.fitted(1, common.max_query_len)
    split = launch.num_splits > 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part, part_lse = empty_row_parts(out, q.shape, launch.num_splits)
    arguments, flags = option_arguments(options, unused=out)
    num_row_tiles = num_rows // block_m + 2 * common.num_reqs + 2
    quick(prefill_kernel, (num_row_tiles * num_heads, launch.num_splits))(
        part, part_lse, q, keys.k, keys.v, *(rows or (keys.k, keys.v)),
        common.query_start_loc, common.seq_lens, keys.table,
        starts, columns, *q.stride()[:2], *keys.strides, starts.shape[1] - 1, common.num_reqs,
        num_rows, launch.num_splits, *arguments,
        NUM_HEADS=num_heads,
        GROUP=num_heads // keys.num_kv_heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size(head_size),
        BLOCK_SIZE=keys.block_size,
        SPARSE_SIZE=sparse_size,
        BLOCK_M=block_m,
        TILE=launch.keys,
        WIDEN=widened(q.dtype),
        KEYS=keys.kind if rows is None else PAGED_TMA.value,
        VECTOR=math.gcd(16, *keys.strides[:-1]),
        FUSED=options.scale > 0 and not any(flags[name] for name in CHANGES_SCORES),
        SPLIT=split,
        **launch.constants(block_m),
        **flags,
        **early_launch(q.device),
    )  # fmt: skip
    if split:
        combine_rows(out, part, part_lse, options.lse)
    return out
