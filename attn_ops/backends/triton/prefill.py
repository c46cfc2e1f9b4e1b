"""Attention for any number of query rows per request: one kernel for a whole mixed batch.

A program owns BLOCK_Q query rows of one request and the query heads that share a kv head, stacked
as the rows of its products, so that a key tile is read once for all of them. The grid comes from
shapes alone; which request a program serves it finds in query_start_loc. Batches of few rows cut
the keys into ranges besides, one program each, as single-token decoding does.

T rows, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
P blocks, B block size, C keys of a tile, M rows of a program (BLOCK_Q x HEADS, padded to a power
of two), R ranges of keys.
"""

import dataclasses
import math

import torch
import triton
import triton.language as tl

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.prefill_keys import DENSE, PAGED, TMA, attend_keys
from attn_ops.backends.triton.prefill_launch import (
    Keys,
    Launch,
    choose_launch,
    dense_keys,
    gathered_keys,
    paged_keys,
)
from attn_ops.backends.triton.prefill_parts import combine_rows, empty_row_parts, store_rows
from attn_ops.backends.triton.tiles import (
    LOG2_E,
    first_logits,
    option_arguments,
    padded_head_size,
    widened,
)
from attn_ops.early_launch.triton.launch import early_launch, wait_for_inputs
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.output_quant.schemes import OutputQuant
from attn_ops.output_quant.triton.epilogue import epilogue_arguments, given_scale
from attn_ops.output_quant.triton.quantize import launch_quantize

CHANGES_SCORES = ("HAS_SOFT_CAP", "HAS_ALIBI", "HAS_K_SCALE")
"""Flags of what stands between a product and its maximum, or may have any sign."""

MOST_GROUPED_ROWS = 1024
"""Rows up to which the kernel quantizes by groups itself, unless keys are gathered."""


@triton.jit
def find_request(
    query_start_loc_ptr, program, num_reqs, BLOCK_Q: tl.constexpr, MORE: tl.constexpr = 1
):
    """Largest r in 0..S with query_start_loc[r] // BLOCK_Q + MORE * r <= program.

    Request r thus owns at least length // BLOCK_Q + MORE programs, and r == S owns the
    rows behind the last request.
    """
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle * MORE <= program:
            low = middle
        else:
            high = middle - 1
    return low


# Batch sizes and the width of the block table change from step to step; specializing on them
# would recompile. Strides of q and the cache are geometry, and their divisibility by 16 is what
# makes loads 16 bytes wide.
@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_splits", "window", "quant"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "part_lse_ptr",
        "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    # [T, N, HEAD_SIZE] contiguous, quantized if HOW is given; if SPLIT [T, N, R, HEAD_SIZE] float32
    out_ptr,
    part_lse_ptr,  # [T, N, R] float32 contiguous, base 2, if SPLIT
    q_ptr,  # [T, N, HEAD_SIZE]
    k_source,  # PAGED [P, B, K, HEAD_SIZE] in q's dtype or FP8, DENSE [T, K, HEAD_SIZE]; or TMA
    v_source,
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, max blocks] int32, if PAGED
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_k_token,
    stride_v_token,
    stride_k_head,  # TMA: rows of a kv head
    stride_v_head,
    stride_table,  # TMA: rows of a request
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
    quant,  # of `store_quantized`, with HOW
    HOW: tl.constexpr,
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
    KEYS: tl.constexpr,  # PAGED, DENSE or TMA
    VECTOR: tl.constexpr,  # divides every stride of the keys
    AHEAD: tl.constexpr,
    FUSED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,  # order of programs: all heads of some rows before other rows
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid ((T // BLOCK_Q + S + 1) * K * ceil(G / HEADS), R)."""
    RIGHT: tl.constexpr = HAS_WINDOW and not CAUSAL
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    NUM_HEAD_TILES: tl.constexpr = NUM_HEADS // GROUP * HEAD_TILES
    wait_for_inputs(PDL)
    num_row_tiles = tl.num_programs(0) // NUM_HEAD_TILES
    if HEADS_FIRST:
        head_program = tl.program_id(0) % NUM_HEAD_TILES
        row_program = tl.program_id(0) // NUM_HEAD_TILES
    else:
        head_program = tl.program_id(0) // num_row_tiles
        row_program = tl.program_id(0) % num_row_tiles
    program = num_row_tiles - 1 - row_program  # late rows see most keys: they start first
    kv_head = head_program // HEAD_TILES
    head_tile = head_program % HEAD_TILES

    # Rows behind the last request are request S, whose sequence is empty: they come out
    # zero like any empty one.
    request = find_request(query_start_loc_ptr, program, num_reqs, BLOCK_Q)
    row_begin = tl.load(query_start_loc_ptr + request)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_reqs, other=num_rows)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    query_len = row_end - row_begin
    if KEYS == DENSE:
        seq_len = tl.minimum(seq_len, query_len)
    if KEYS == TMA:  # beyond max_seq_len the result is wrong, but of the request's own keys
        seq_len = tl.minimum(seq_len, stride_table)
    first = (program - row_begin // BLOCK_Q - request) * BLOCK_Q
    if first >= query_len:
        return

    given = given_scale(quant, HOW)
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

    split = tl.program_id(1)
    if SPLIT:  # this program's range of keys cuts off what lies outside of it
        split_len = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), num_splits), TILE) * TILE
        begin += split * split_len
        end = tl.minimum(begin + split_len, end)
        all_begin = tl.minimum(tl.maximum(all_begin, begin), tl.maximum(end, begin))
        all_end = tl.maximum(tl.minimum(all_end, end), all_begin)

    first_row = 0
    if KEYS == TMA:
        first_row = kv_head * stride_k_head + request * stride_table
    else:
        k_source += tl.multiple_of(kv_head.to(tl.int64) * stride_k_head, VECTOR)
        v_source += tl.multiple_of(kv_head.to(tl.int64) * stride_v_head, VECTOR)
    if KEYS == DENSE:
        k_source += tl.multiple_of(row_begin.to(tl.int64) * stride_k_token, VECTOR)
        v_source += tl.multiple_of(row_begin.to(tl.int64) * stride_v_token, VECTOR)
    if KEYS == PAGED:
        table_ptr += request.to(tl.int64) * stride_table
    acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
    # The first range counts the sink. It holds a key, if the request does.
    counted_M = owned_M & (split == 0) & (seq_len > 0)
    max_M, sum_M = first_logits(sinks_ptr, head_M, counted_M, BLOCK_M, HAS_SINKS)
    if HAS_WINDOW:
        acc_MH, max_M, sum_M = attend_keys(
            acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_source, v_source, table_ptr,
            first_row, seq_len, begin, all_begin, stride_block, stride_k_token, stride_v_token,
            score_scale, soft_cap, window, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, KEYS,
            AHEAD, CAUSAL, HAS_WINDOW, RIGHT, HAS_SOFT_CAP, HAS_ALIBI, FUSED, MASKED=True,
            VECTOR=VECTOR,
        )  # fmt: skip
    acc_MH, max_M, sum_M = attend_keys(
        acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_source, v_source, table_ptr,
        first_row, seq_len, all_begin, all_end, stride_block, stride_k_token, stride_v_token,
        score_scale, soft_cap, window, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, KEYS,
        AHEAD, CAUSAL, HAS_WINDOW, RIGHT, HAS_SOFT_CAP, HAS_ALIBI, FUSED, MASKED=False,
        VECTOR=VECTOR,
    )  # fmt: skip
    acc_MH, max_M, sum_M = attend_keys(
        acc_MH, max_M, sum_M, q_MH, position_M, slope_M, k_source, v_source, table_ptr,
        first_row, seq_len, all_end, end, stride_block, stride_k_token, stride_v_token,
        score_scale, soft_cap, window, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, KEYS,
        AHEAD, CAUSAL, HAS_WINDOW, RIGHT, HAS_SOFT_CAP, HAS_ALIBI, FUSED, MASKED=True,
        VECTOR=VECTOR,
    )  # fmt: skip
    store_rows(
        out_ptr, part_lse_ptr, lse_ptr, acc_MH, max_M, sum_M, row_M, head_M, owned_M, split,
        num_splits, v_scale_ptr, given, quant, HOW, NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE,
        BLOCK_M, HAS_V_SCALE, HAS_LSE, SPLIT,
    )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    launch: Launch | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous; writes `options.lse`.

    With `options.quant` the output is quantized as it says. Of the batch's ints max_query_len and
    max_seq_len are read; both must bound the batch's lengths, in a captured launch those of every
    replay. `launch` overrides the choice.
    """
    quant = options.quant
    launch = launch or choose_launch(q, kv_cache, common)
    if quant is not None and not _quantizes(quant.how, q, launch):
        plain = dataclasses.replace(options, quant=None)
        return launch_quantize(prefill_attention(q, kv_cache, common, plain, launch), quant)
    if launch.gather:
        keys = gathered_keys(kv_cache, common, options, q.dtype, launch.keys)
    else:
        keys = paged_keys(kv_cache, common, options)
    return _attend(q, keys, common, options, launch)


def _quantizes(how: OutputQuant, q: torch.Tensor, launch: Launch) -> bool:
    """Whether the kernel quantizes q's rows itself, and faster than a kernel behind it.

    By groups of 128, attention of a prompt of 2,048 tokens took 111.4 us with its own quantization
    and 107.2 with a kernel behind it, of 512 tokens 18.3 and 19.7 (one H200, 2026-11-22).
    """
    many = how.group is not None and q.shape[0] > MOST_GROUPED_ROWS and not launch.gather
    return how.within_heads(q.shape[2]) and not many


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Without a cache: q [T, N, H], k and v [T, K, H] -> [T, N, H] contiguous.

    A request's keys are its rows of k, as query_start_loc says; rows behind the last request are
    not read. Strides are free but for contiguous heads. Writes `options.lse`.
    """
    launch = launch or choose_launch(q, k, common)._replace(gather=False)
    return _attend(q, dense_keys(k, v), common, options, launch)


def _attend(
    q: torch.Tensor,
    keys: Keys,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    launch: Launch,
) -> torch.Tensor:
    """Launch the kernel, and the one that combines if keys are split."""
    num_rows, num_heads, head_size = q.shape
    group = num_heads // keys.num_kv_heads
    block_m, heads = launch.fitted(group, common.max_query_len)
    quant, split = options.quant, launch.num_splits > 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if quant is None else quant.out
    part, part_lse = empty_row_parts(out, q.shape, launch.num_splits)
    epilogue = epilogue_arguments(quant, q.dtype)
    none = {"quant": None, "HOW": None}
    arguments, flags = option_arguments(options, unused=out)
    num_head_tiles = keys.num_kv_heads * triton.cdiv(group, heads)
    num_row_tiles = num_rows // (block_m // heads) + common.num_reqs + 1
    prefill_kernel[(num_row_tiles * num_head_tiles, launch.num_splits)](
        part,
        part_lse,
        q,
        keys.k,
        keys.v,
        common.query_start_loc,
        common.seq_lens,
        keys.table,
        *q.stride()[:2],
        *keys.strides,
        common.num_reqs,
        num_rows,
        launch.num_splits,
        *arguments,
        **(none if split else epilogue),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size(head_size),
        BLOCK_SIZE=keys.block_size,
        BLOCK_M=block_m,
        TILE=launch.keys,
        CAUSAL=common.causal,
        WIDEN=widened(q.dtype),
        KEYS=keys.kind,
        VECTOR=math.gcd(16, *keys.strides[:-1]),
        FUSED=options.scale > 0 and not any(flags[name] for name in CHANGES_SCORES),
        SPLIT=split,
        **launch.constants(block_m),
        **flags,
        **early_launch(q.device),
    )
    if split:
        combine_rows(out, part, part_lse, options.lse, epilogue)
    return out
