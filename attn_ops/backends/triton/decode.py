"""Paged attention for single-token queries: keys split over programs, then the parts combined.

A program owns a range of one request's own keys and the query heads that share a kv head, as the
rows of its products. How many ranges a request is cut into the host decides from shapes and
`max_seq_len`; where they lie the kernel computes from seq_lens, so a captured launch is right for
other lengths (flash decoding, Dao et al. 2023).

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
P block ids of a tile, B block size, C keys of a tile, M rows of a program (HEADS, padded to a power
of two), R ranges of keys, I = K * ceil(G / HEADS) programs per request and range.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.decode_parts import (
    PROGRAMS_PER_SM,
    combine,
    empty_parts,
    key_ranges,
    num_splits_of,
    store_padding,
    store_range,
)
from attn_ops.backends.triton.tiles import (
    LOG2_E,
    MAX_SPLITS,
    first_logits,
    num_sms,
    option_arguments,
    padded_head_size,
    readable,
    widened,
)
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import next_power_of_2
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.output_quant.triton.epilogue import epilogue_arguments, given_scale

__all__ = ["MAX_SPLITS", "DecodeConstants", "decode_attention"]

MAX_HEADS = 32
"""Query heads of one program; larger groups are cut."""


@triton.jit
def tile_blocks(table_ptr, start, last, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """[P] physical blocks of the tile at key `start`; behind key `last`, its own block again.

    One id per block and not per key: loads of ids would be half as many as those of keys.
    """
    PAGES: tl.constexpr = TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1
    page_P = start // BLOCK_SIZE + tl.arange(0, PAGES)
    return tl.load(table_ptr + tl.minimum(page_P, tl.maximum(last, 0) // BLOCK_SIZE))


@triton.jit
def listed_entry(entries_ptr, place, end, LISTED: tl.constexpr):
    """(key, rows) at `place` of the keys in listed blocks of LISTED keys; none from `end` on."""
    entry_ptr = entries_ptr + place // LISTED * 2
    column = tl.load(entry_ptr, mask=place < end, other=0)
    rows = tl.load(entry_ptr + 1, mask=place < end, other=0)
    return column * LISTED + place % LISTED, rows


@triton.jit
def attend_range(
    acc_MH,
    max_M,
    sum_M,
    q_MH,  # its dtype is that of the products
    slope_M,  # of ALiBi, base 2, if HAS_ALIBI
    k_ptr,  # of this kv head, at physical block 0
    v_ptr,
    table_ptr,  # the request's row of the block table
    seq_len,
    begin,  # keys begin..end are visited; begin is a multiple of TILE, every tile has a visible key
    end,
    stride_block,
    stride_token,
    scale_M,
    soft_cap,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STAGED: tl.constexpr,
    entries_ptr=None,  # [.., 2] blocks that are visited and, bit by bit, the rows that see them
    BLOCK_M: tl.constexpr = 0,  # rows, if LISTED; at most 32
    LISTED: tl.constexpr = 0,  # keys of a listed block, a multiple of TILE; 0: no list
):
    """Streaming softmax over key tiles, base 2, float32: acc_MH (not normalized), max_M, sum_M.

    With STAGED, values become float16 before they are laid out for the product. Block ids are
    loaded one tile ahead. Keys past the last one are not masked in loads but loaded as the last
    one, with weight zero: slots past seq_len may hold NaN, which a weight would not silence.
    """
    PAGES: tl.constexpr = TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1
    last = seq_len - 1
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    if HEAD_SIZE == PADDED_HEAD_SIZE:  # a constant mask: the load is then unpredicated
        stored_H = tl.full([PADDED_HEAD_SIZE], 1, tl.int1)
    else:
        stored_H = h_H < HEAD_SIZE
    if LISTED:
        next_start, next_rows = listed_entry(entries_ptr, begin, end, LISTED)
        first = next_start
    else:
        first = begin
    next_P = tile_blocks(table_ptr, first, last, TILE, BLOCK_SIZE)
    for place in range(begin, end, TILE):
        block_P = next_P  # keys of the next tile will wait for one load and not for two
        if LISTED:
            start, rows = next_start, next_rows
            next_start, next_rows = listed_entry(entries_ptr, place + TILE, end, LISTED)
            behind = next_start
        else:
            start = place
            behind = place + TILE
        next_P = tile_blocks(table_ptr, behind, last, TILE, BLOCK_SIZE)
        key_C = start + tl.arange(0, TILE)
        base_P = block_P.to(tl.int64) * stride_block
        base_C = tl.broadcast_to(base_P[:, None], [PAGES, TILE // PAGES]).reshape(TILE)
        offset_C = base_C + tl.minimum(key_C, last) % BLOCK_SIZE * stride_token
        offset_C = tl.multiple_of(offset_C, VECTOR)
        offset_CH = offset_C[:, None] + h_H[None, :]
        stored_CH = tl.broadcast_to(stored_H[None, :], [TILE, PADDED_HEAD_SIZE])
        k_CH = tl.load(k_ptr + offset_CH, mask=stored_CH, other=0.0)
        v_CH = tl.load(v_ptr + offset_CH, mask=stored_CH, other=0.0)
        k_HC = tl.trans(k_CH.to(q_MH.dtype))
        v_CH = v_CH.to(q_MH.dtype)
        # An empty instruction behind which the conversion cannot move. Else shared memory is read
        # in single bytes: 740 and not 433 instructions a tile (Triton 3.6, sm_90, 2026-11-21).
        if STAGED:
            v_CH = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [v_CH], dtype=tl.float16, is_pure=False, pack=2
            )
        score_MC = tl.dot(q_MH, k_HC, input_precision="ieee") * scale_M[:, None]
        if HAS_SOFT_CAP:  # soft_cap * tanh(x); scale_M holds 2 * log2(e) of tanh's exponential
            score_MC = soft_cap * (1.0 - 2.0 / (tl.exp2(score_MC) + 1.0))
        if HAS_ALIBI:  # in float32, which is exact below 2 ** 24
            score_MC -= slope_M[:, None] * (last - key_C).to(tl.float32)[None, :]
        visible_C = key_C <= last
        if HAS_WINDOW:
            visible_C = visible_C & (key_C > last - window)
        visible_MC = visible_C[None, :]
        if LISTED:
            visible_MC = visible_MC & (((rows >> tl.arange(0, BLOCK_M)) & 1) != 0)[:, None]
        score_MC = tl.where(visible_MC, score_MC, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if LISTED:  # a row that has seen no key yet: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MC = tl.exp2(score_MC - base_M[:, None])
        rescale_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_MC, 1)
        acc_MH = tl.dot(
            weight_MC.to(q_MH.dtype),
            v_CH,
            acc_MH * rescale_M[:, None],
            input_precision="ieee",
        )
        max_M = new_max_M
    return acc_MH, max_M, sum_M


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_splits", "window", "quant"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr",
        "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous; quantized, if HOW is given
    part_ptr,  # [S, I, R, HEADS, HEAD_SIZE] float32 contiguous, if SPLIT
    part_lse_ptr,  # [S, I, R, HEADS] float32 contiguous, base 2, if SPLIT
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
    sinks_ptr,  # [N] float32 or q's dtype, if HAS_SINKS
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
    VECTOR: tl.constexpr,  # divides every stride of the cache
    STAGED: tl.constexpr,  # FP8 values pass through registers
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,  # q in float32
    HALF: tl.constexpr,  # q in float16, which FP8 converts to in one instruction
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (max(S, T) * I, R). Kv heads come first: they lie next to each other in the cache."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ITEMS: tl.constexpr = NUM_HEADS // GROUP * HEAD_TILES
    request = tl.program_id(0) // ITEMS
    item = tl.program_id(0) % ITEMS
    kv_head = item // HEAD_TILES
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    m_M = tl.arange(0, BLOCK_M)
    in_group_M = item % HEAD_TILES * HEADS + m_M
    head_M = kv_head * GROUP + in_group_M
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    owned_M = (m_M < HEADS) & (in_group_M < GROUP)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]

    given = given_scale(quant, HOW)
    # All four at once: they are the first of a chain of loads that wait for each other.
    known = request < num_reqs
    pad_row = tl.load(query_start_loc_ptr + num_reqs).to(tl.int64) + request
    row = tl.load(query_start_loc_ptr + request, mask=known, other=0).to(tl.int64)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=known, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=known, other=0)

    # Row number `request` behind the last request's is padding, if the batch has so many rows.
    if (pad_row < num_rows) & (split == 0):
        store_padding(
            out_ptr, lse_ptr, pad_row, head_M, owned_M, given, quant, HOW,
            NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_M, HAS_LSE,
        )  # fmt: skip
    first, length, num_ranges = key_ranges(seq_len, window, num_splits, TILE, HAS_WINDOW)
    if (row_end <= row) | (split >= tl.maximum(num_ranges, 1)):
        return

    begin = first + split * length
    end = tl.minimum(begin + length, seq_len)
    q_MH = tl.load(
        q_ptr + row * stride_q_row + (head_M * stride_q_head)[:, None] + h_H[None, :],
        mask=mask_MH,
        other=0.0,
    )
    if WIDEN:
        q_MH = q_MH.to(tl.float32)
    if HAS_K_SCALE:
        score_scale *= tl.load(k_scale_ptr)
    scale_M = score_scale + tl.zeros([BLOCK_M], tl.float32)
    if HALF:  # rows are brought to at most 1, as bfloat16 reaches further than float16
        largest_M = tl.max(tl.abs(q_MH.to(tl.float32)), 1)
        largest_M = tl.where(largest_M == 0.0, 1.0, largest_M)
        q_MH = (q_MH.to(tl.float32) / largest_M[:, None]).to(tl.float16)
        scale_M *= largest_M
    slope_M = 0.0
    if HAS_ALIBI:
        slope_M = tl.load(alibi_ptr + head_M, mask=owned_M, other=0.0) * LOG2_E
    # The first range counts the sink. It holds a key, if the request does.
    counted_M = owned_M & (split == 0) & (seq_len > 0)
    max_M, sum_M = first_logits(sinks_ptr, head_M, counted_M, BLOCK_M, HAS_SINKS)
    k_ptr = kv_ptr + tl.multiple_of(kv_head.to(tl.int64) * stride_kv_head, VECTOR)
    table_ptr += request.to(tl.int64) * stride_table
    acc_MH, max_M, sum_M = attend_range(
        tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32), max_M, sum_M, q_MH, slope_M,
        k_ptr, k_ptr + stride_kv, table_ptr, seq_len, begin, end,
        stride_block, stride_token, scale_M, soft_cap, window,
        HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, VECTOR,
        HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, STAGED,
    )  # fmt: skip
    store_range(
        out_ptr, part_ptr, part_lse_ptr, lse_ptr, acc_MH, max_M, sum_M, row, head_M, owned_M, split,
        num_ranges, num_splits, v_scale_ptr, given, quant, HOW, NUM_HEADS, HEADS, HEAD_SIZE,
        PADDED_HEAD_SIZE, BLOCK_M, HAS_V_SCALE, HAS_LSE, SPLIT,
    )  # fmt: skip


class DecodeConstants(NamedTuple):
    """Constants of a launch."""

    keys: int  # of a tile
    num_warps: int
    num_stages: int
    long_programs_per_sm: int = PROGRAMS_PER_SM  # wanted while their ranges stay long


def decode_constants(padded_head_size: int, dtype: torch.dtype, fp8: bool) -> DecodeConstants:
    """The best of a sweep over 45 forms at head size 128, by the worst of five batches.

    0.99 to 1.65 times FA3's speed (one H200, Triton 3.6, 2026-11-21). Other head sizes are not
    measured.
    """
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return DecodeConstants(32, 4, 1) if padded_head_size <= 64 else DecodeConstants(16, 8, 1)
    if padded_head_size > 256:
        return DecodeConstants(16, 4, 2)
    if fp8:  # one warp converts a tile for itself; more of them hide that
        return DecodeConstants(32, 1, 4, long_programs_per_sm=16)
    return DecodeConstants(32, 2, 4) if padded_head_size <= 128 else DecodeConstants(32, 4, 3)


def decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    num_splits: int | None = None,
    constants: DecodeConstants | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous; writes `options.lse`.

    With `options.quant` the output is quantized as it says. No query of the batch is longer than
    one token: it is its request's last, so that `common.causal` makes no difference.

    Args:
        num_splits, constants: override the choice, see `decode_work`.
    """
    max_keys = min(common.max_seq_len, options.sliding_window or common.max_seq_len)
    work = decode_work(q, kv_cache, common, options, max_keys, num_splits, constants)
    chosen, out, num_splits, shape = work.constants, work.out, work.num_splits, work.shape
    quick(decode_kernel, (max(common.num_reqs, q.shape[0]) * work.units, num_splits))(
        out, work.part, work.part_lse, q, readable(kv_cache, options),
        common.query_start_loc, common.seq_lens, common.block_table_tensor,
        *q.stride()[:2], *kv_cache.stride()[:4], common.block_table_tensor.stride(0),
        common.num_reqs, q.shape[0], num_splits, *work.arguments, work.epilogue["quant"],
        HOW=work.epilogue["HOW"],
        **shape,
        TILE=chosen.keys,
        SPLIT=num_splits > 1,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **work.flags,
        **early_launch(q.device),
    )  # fmt: skip
    if num_splits > 1 and common.num_reqs:
        combine(
            out, work.part, work.part_lse, common, options.sliding_window, options.lse,
            work.epilogue, group=shape["GROUP"], tile=chosen.keys,
        )  # fmt: skip
    return out


class DecodeWork(NamedTuple):
    """What a launch over split keys needs, whichever keys its programs visit."""

    constants: DecodeConstants
    units: int  # I: programs of a request and range
    num_splits: int  # R
    out: torch.Tensor  # [T, N, H], quantized or not
    part: torch.Tensor  # with part_lse, of `empty_parts`
    part_lse: torch.Tensor
    epilogue: dict[str, Any]
    arguments: Sequence[Any]  # with flags, of `option_arguments`
    flags: dict[str, bool]
    shape: dict[str, int]  # of `geometry`


def decode_work(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    max_keys: int,
    num_splits: int | None,
    constants: DecodeConstants | None,
) -> DecodeWork:
    """Constants, ranges and memory of a launch.

    Args:
        max_keys: most keys that a query sees, or an upper bound.
        num_splits: overrides the choice, 1 to MAX_SPLITS.
        constants: override the choice.
    """
    num_kv_heads, fp8 = kv_cache.shape[3], options.kv_cache_dtype != "auto"
    group = q.shape[1] // num_kv_heads
    heads = min(group, MAX_HEADS)
    shape = geometry(q, kv_cache, heads, fp8)
    chosen = constants or decode_constants(shape["PADDED_HEAD_SIZE"], q.dtype, fp8)
    whole = kv_cache.shape[2] & -kv_cache.shape[2]
    if whole < kv_cache.shape[2]:  # a tile lies in one block, or is several whole ones
        chosen = chosen._replace(keys=min(chosen.keys, whole))
    units = num_kv_heads * -(-group // heads)
    if num_splits is None:
        num_splits = num_splits_of(
            common, max_keys, units, row_bytes=4 * units * heads * q.shape[2],
            multiprocessors=num_sms(q.device), long_programs_per_sm=chosen.long_programs_per_sm,
        )  # fmt: skip
    quant = options.quant
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if quant is None else quant.out
    parts = empty_parts(out, common.num_reqs * units, num_splits, heads, q.shape[2])
    epilogue = epilogue_arguments(quant, q.dtype)
    asked = option_arguments(options, unused=out)
    return DecodeWork(chosen, units, num_splits, out, *parts, epilogue, *asked, shape)


def geometry(
    q: torch.Tensor, kv_cache: torch.Tensor, heads: int, fp8: bool
) -> dict[str, int | bool]:
    """The kernel's constants that follow from shapes, strides and dtypes."""
    _, num_heads, head_size = q.shape
    half = fp8 and q.dtype == torch.bfloat16
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // kv_cache.shape[3],
        "HEADS": heads,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": padded_head_size(head_size),
        "BLOCK_SIZE": kv_cache.shape[2],
        "BLOCK_M": max(16, next_power_of_2(heads)),
        "VECTOR": math.gcd(16, *kv_cache.stride()[:4]),
        "STAGED": fp8 and q.dtype != torch.float32 and not knobs.runtime.interpret,
        "WIDEN": widened(q.dtype) and not half,
        "HALF": half,
    }
