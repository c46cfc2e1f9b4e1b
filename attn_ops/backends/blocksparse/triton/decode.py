"""Block-sparse attention of single-token queries: the keys of listed blocks split over programs.

A program owns a range of the listed keys of one request and the query heads of a unit, which share
a kv head: a block that any of them sees is read once, and the others' scores are masked. Ranges
are cut by the number of listed keys, so that programs of one request have equally much to read.

T tokens, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
B block size, M rows of a program (HEADS, padded to a power of two), R ranges of keys,
U = K * ceil(G / HEADS) units, L blocks of the layout, F blocks that units list.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.blocksparse.triton.prefill import divisor
from attn_ops.backends.triton.decode import (
    MAX_HEADS,
    DecodeConstants,
    DecodeWork,
    attend_range,
    decode_work,
)
from attn_ops.backends.triton.decode_parts import combine_row, store_padding, store_range
from attn_ops.backends.triton.tiles import LOG2_E, first_logits, readable
from attn_ops.block_layout.tables import UNIT_HEADS
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import next_power_of_2
from attn_ops.metadata import CommonAttentionMetadata

assert UNIT_HEADS == MAX_HEADS, "a unit of the tables is the query heads of a program"


@triton.jit
def listed_ranges(
    unit_starts_ptr,
    unit_entries_ptr,
    unit,
    seq_len,
    num_layout_blocks,
    num_splits,
    SPARSE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """(first entry, listed keys, keys of a range, ranges that hold a key) of a request and unit."""
    block = tl.minimum(tl.maximum(seq_len - 1, 0) // SPARSE_SIZE, num_layout_blocks - 1)
    starts_ptr = unit_starts_ptr + unit * (num_layout_blocks + 1) + block
    begin = tl.load(starts_ptr)
    end = tl.where(seq_len > 0, tl.load(starts_ptr + 1), begin)
    last = tl.load(unit_entries_ptr + (end - 1) * 2, mask=end > begin, other=-1)
    missing = tl.where(last == block, (block + 1) * SPARSE_SIZE - seq_len, 0)  # of the own block
    num_keys = (end - begin) * SPARSE_SIZE - missing
    length = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), TILE), 1) * TILE
    return begin, num_keys, length, tl.cdiv(num_keys, length)


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_splits"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "unit_starts_ptr", "unit_entries_ptr",
        "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
    part_ptr,  # [S, U, R, HEADS, HEAD_SIZE] float32 contiguous, if SPLIT
    part_lse_ptr,  # [S, U, R, HEADS] float32 contiguous, base 2, if SPLIT
    q_ptr,  # [T, N, HEAD_SIZE]
    kv_ptr,  # [P, 2, B, K, HEAD_SIZE], in q's dtype or FP8
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, max blocks] int32
    unit_starts_ptr,  # [U, L + 1] int32
    unit_entries_ptr,  # [F, 2] int32
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_kv,
    stride_token,
    stride_kv_head,
    stride_table,
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
    HEADS: tl.constexpr,  # query heads of a unit, at most G
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPARSE_SIZE: tl.constexpr,  # tokens of a block of the layout
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,  # divides SPARSE_SIZE
    VECTOR: tl.constexpr,  # divides every stride of the cache
    STAGED: tl.constexpr,  # FP8 values pass through registers
    HAS_WINDOW: tl.constexpr,  # False
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
    """Grid (max(S, T) * U, R)."""
    UNITS_OF_HEAD: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    UNITS: tl.constexpr = NUM_HEADS // GROUP * UNITS_OF_HEAD
    request = tl.program_id(0) // UNITS
    unit = tl.program_id(0) % UNITS
    kv_head = unit // UNITS_OF_HEAD
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    m_M = tl.arange(0, BLOCK_M)
    in_group_M = unit % UNITS_OF_HEAD * HEADS + m_M
    head_M = kv_head * GROUP + in_group_M
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    owned_M = (m_M < HEADS) & (in_group_M < GROUP)

    known = request < num_reqs
    pad_row = tl.load(query_start_loc_ptr + num_reqs).to(tl.int64) + request
    row = tl.load(query_start_loc_ptr + request, mask=known, other=0).to(tl.int64)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=known, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=known, other=0)
    # Row number `request` behind the last request's is padding, if the batch has so many rows.
    if (pad_row < num_rows) & (split == 0):
        store_padding(
            out_ptr, lse_ptr, pad_row, head_M, owned_M, None, None, None,
            NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_M, HAS_LSE,
        )  # fmt: skip
    first_entry, num_keys, length, num_ranges = listed_ranges(
        unit_starts_ptr, unit_entries_ptr, unit, seq_len, num_layout_blocks, num_splits,
        SPARSE_SIZE, TILE,
    )  # fmt: skip
    if (row_end <= row) | (split >= tl.maximum(num_ranges, 1)):
        return

    q_MH = tl.load(
        q_ptr + row * stride_q_row + (head_M * stride_q_head)[:, None] + h_H[None, :],
        mask=owned_M[:, None] & (h_H < HEAD_SIZE)[None, :],
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
    counted_M = owned_M & (split == 0) & (seq_len > 0)
    max_M, sum_M = first_logits(sinks_ptr, head_M, counted_M, BLOCK_M, HAS_SINKS)
    begin = split * length
    k_ptr = kv_ptr + tl.multiple_of(kv_head.to(tl.int64) * stride_kv_head, VECTOR)
    table_ptr += request.to(tl.int64) * stride_table
    acc_MH, max_M, sum_M = attend_range(
        tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32), max_M, sum_M, q_MH, slope_M,
        k_ptr, k_ptr + stride_kv, table_ptr, seq_len, begin, tl.minimum(begin + length, num_keys),
        stride_block, stride_token, scale_M, soft_cap, window,
        HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_SIZE, TILE, VECTOR,
        HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, STAGED,
        unit_entries_ptr + first_entry * 2, BLOCK_M, SPARSE_SIZE,
    )  # fmt: skip
    store_range(
        out_ptr, part_ptr, part_lse_ptr, lse_ptr, acc_MH, max_M, sum_M, row, head_M, owned_M, split,
        num_ranges, num_splits, v_scale_ptr, None, None, None, NUM_HEADS, HEADS, HEAD_SIZE,
        PADDED_HEAD_SIZE, BLOCK_M, HAS_V_SCALE, HAS_LSE, SPLIT,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "unit_starts_ptr", "unit_entries_ptr", "lse_ptr",
    ],
)  # fmt: skip
def combine_kernel(
    out_ptr,  # as of `decode_kernel`, all but PARTS
    part_ptr,
    part_lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    unit_starts_ptr,
    unit_entries_ptr,
    num_layout_blocks,
    num_splits,
    lse_ptr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    SPARSE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,  # merged at a time
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (S, N): merges one row and head, where the decode kernel has left it to be merged."""
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) <= row:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    unit = head // GROUP * ((GROUP + HEADS - 1) // HEADS) + head % GROUP // HEADS
    _, _, _, num_ranges = listed_ranges(
        unit_starts_ptr, unit_entries_ptr, unit, seq_len, num_layout_blocks, num_splits,
        SPARSE_SIZE, TILE,
    )  # fmt: skip
    if num_ranges <= 1:
        return
    combine_row(
        out_ptr, part_ptr, part_lse_ptr, lse_ptr, request, row, head, num_ranges, num_splits,
        None, None, None, NUM_HEADS, GROUP, HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, PARTS, HAS_LSE,
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    sparse_size: int,
    layout: Sequence[torch.Tensor],
    num_splits: int | None = None,
    constants: DecodeConstants | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous; writes `options.lse`.

    No query of the batch is longer than one token. `layout` are tensors of `BlockTables` for blocks
    of `sparse_size` tokens.

    Args:
        num_splits, constants: override the choice, see `decode_work`.
    """
    work = decode_work(q, kv_cache, common, options, common.max_seq_len, num_splits, constants)
    chosen, num_splits = work.constants, work.num_splits
    _, _, unit_starts, unit_entries = layout
    sizes = {"SPARSE_SIZE": sparse_size, "TILE": divisor(sparse_size, chosen.keys)}
    quick(decode_kernel, (max(common.num_reqs, q.shape[0]) * work.units, num_splits))(
        work.out, work.part, work.part_lse, q, readable(kv_cache, options),
        common.query_start_loc, common.seq_lens, common.block_table_tensor,
        unit_starts, unit_entries,
        *q.stride()[:2], *kv_cache.stride()[:4], common.block_table_tensor.stride(0),
        unit_starts.shape[1] - 1, common.num_reqs, q.shape[0], num_splits,
        *work.arguments,
        **work.shape,
        **sizes,
        SPLIT=num_splits > 1,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **work.flags,
        **early_launch(q.device),
    )  # fmt: skip
    if num_splits > 1 and common.num_reqs:
        combine(work, common, unit_starts, unit_entries, options.lse, sizes)
    return work.out


def combine(
    work: DecodeWork,
    common: CommonAttentionMetadata,
    unit_starts: torch.Tensor,
    unit_entries: torch.Tensor,
    lse: torch.Tensor | None,
    sizes: dict[str, int],
) -> None:
    """The parts of `work` into the requests' rows of its output and of `lse`."""
    padded_head_size = work.shape["PADDED_HEAD_SIZE"]
    names = ("NUM_HEADS", "GROUP", "HEADS", "HEAD_SIZE", "PADDED_HEAD_SIZE")
    quick(combine_kernel, (common.num_reqs, work.shape["NUM_HEADS"]))(
        work.out, work.part, work.part_lse, common.query_start_loc, common.seq_lens,
        unit_starts, unit_entries, unit_starts.shape[1] - 1, work.num_splits,
        work.out if lse is None else lse,
        **{name: work.shape[name] for name in names},
        **sizes,
        PARTS=min(next_power_of_2(work.num_splits), max(8192 // padded_head_size, 1)),
        HAS_LSE=lse is not None,
        num_warps=4,
        **early_launch(work.out.device),
    )  # fmt: skip
