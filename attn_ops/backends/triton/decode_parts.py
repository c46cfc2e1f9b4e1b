"""Ranges of keys: how many a request is cut into, where they lie, and how their results are merged.

S requests, N query heads, H head size padded to a power of two, R ranges of a request, E query
heads of one program, I programs per range (kv heads, or several per kv head of a large group).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from attn_ops.backends.triton.tiles import LN_2, MAX_SPLITS, padded_head_size
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.output_quant.triton.epilogue import given_scale, store_quantized

PROGRAMS_PER_SM = 4
"""Wanted at least: fewer leave an SM waiting for memory. One H200, 2026-11-21: of 2 to 64 ranges,
the fastest made about 512 programs for 8x4096, 1x32768 and 256 for 1x1024 (requests x context)."""

MIN_TOKENS_PER_SPLIT = 32
"""A tile: shorter ranges are none. 1x1024 takes 6.7 us with 32 ranges, 7.3 with 16 (as above)."""

LONG_RANGE = 512
"""Tokens from which a range may be cut further, to `long_programs_per_sm`."""

REQS_PER_QUERY = 8
"""Requests of a batch with padding, by those expected to have a query. Of 17, 32/8 heads of 128,
one with 4096 keys takes 43.6 us with 3 ranges, as if all were there, and 15.4 with 32; 16 of them
take 71.2 and 77.2. Of 65, 16 take 110.9 with 1 and 76.2 with 8. One H200, 2026-11-21, before
bbef76b, a script that is not kept; 65 at once were not measured."""

MAX_PARTS_BYTES = 32 << 20
"""Of parts, where padding makes them more: they are made for all requests."""


def expected_reqs(common: CommonAttentionMetadata) -> int:
    """Requests that have a query, as far as the host knows; the others' programs end at once."""
    few = common.num_reqs // REQS_PER_QUERY
    if common.num_logits is not None:  # a replay's, of a step that also has chunks of prompts
        return max(few, 1)
    return max(min(common.num_reqs, common.num_actual_tokens), few, 1)


def num_splits_of(
    common: CommonAttentionMetadata, max_keys: int, items: int, row_bytes: int, **limits: int
) -> int:
    """Ranges per request of a batch.

    Args:
        common: the batch, whose requests need not all have a query.
        max_keys: most keys that a query sees, or an upper bound.
        items: I.
        row_bytes: of the parts of a request and range.
        limits: of `choose_num_splits`.
    """
    whole = choose_num_splits(common.num_reqs * items, max_keys, **limits)
    few = choose_num_splits(expected_reqs(common) * items, max_keys, **limits)
    return max(whole, min(few, MAX_PARTS_BYTES // max(common.num_reqs * row_bytes, 1)))


def choose_num_splits(
    num_programs: int,
    max_keys: int,
    multiprocessors: int,
    long_programs_per_sm: int = PROGRAMS_PER_SM,
) -> int:
    """Ranges per request, from host values that a captured graph may freeze.

    Args:
        num_programs: programs without splitting.
        max_keys: most keys that a query sees, or an upper bound.
        multiprocessors: of the device.
        long_programs_per_sm: wanted, as long as ranges have LONG_RANGE tokens.
    """
    # Rounded down: a few programs more than fit at a time would run alone.
    programs = max(num_programs, 1)
    wanted = PROGRAMS_PER_SM * multiprocessors // programs
    longer = min(long_programs_per_sm * multiprocessors // programs, max_keys // LONG_RANGE)
    most = min(cdiv(max_keys, MIN_TOKENS_PER_SPLIT), MAX_SPLITS)
    return max(1, min(max(wanted, longer), most))


@triton.jit
def key_ranges(seq_len, window, num_splits, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """(first key, keys of a range, ranges that hold a key): whole tiles, so that few are cut."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // TILE * TILE
    num_keys = tl.maximum(seq_len - first, 0)
    length = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), TILE), 1) * TILE
    return first, length, tl.cdiv(num_keys, length)


@triton.jit
def store_padding(
    out_ptr,  # as of `decode_kernel`
    lse_ptr,
    row,  # int64
    head_M,
    owned_M,
    given,
    quant,
    HOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Heads of a padding row: zero, as the output is quantized."""
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    if HOW is None:
        zero_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], out_ptr.dtype.element_ty)
        offset_MH = (head_M * HEAD_SIZE)[:, None] + h_H[None, :]
        mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
        tl.store(out_ptr + row * NUM_HEADS * HEAD_SIZE + offset_MH, zero_MH, mask=mask_MH)
    else:
        store_quantized(
            out_ptr, tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32), row + 0 * head_M,
            head_M, owned_M, given, quant, HOW, NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_M,
        )  # fmt: skip
    if HAS_LSE:
        none_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(lse_ptr + row * NUM_HEADS + head_M, none_M, mask=owned_M)


@triton.jit
def store_range(
    out_ptr,  # as of `decode_kernel`
    part_ptr,
    part_lse_ptr,
    lse_ptr,
    acc_MH,
    max_M,
    sum_M,
    row,
    head_M,
    owned_M,
    split,
    num_ranges,
    num_splits,
    v_scale_ptr,
    given,
    quant,
    HOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """What a program has computed of its range: a row's result, if the range is its only one."""
    m_M = tl.arange(0, BLOCK_M)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    result_MH = acc_MH / total_M[:, None]
    lse_M = max_M + tl.log2(total_M)
    if HAS_V_SCALE:
        result_MH *= tl.load(v_scale_ptr)
    out_row_ptr = out_ptr + row * NUM_HEADS * HEAD_SIZE
    lse_row_ptr = lse_ptr + row * NUM_HEADS
    PARTS_ONLY: tl.constexpr = SPLIT and HOW is not None  # else both kernels would quantize
    if num_ranges <= 1 and not PARTS_ONLY:
        if HOW is None:
            offset_MH = (head_M * HEAD_SIZE)[:, None] + h_H[None, :]
            tl.store(out_row_ptr + offset_MH, result_MH.to(out_ptr.dtype.element_ty), mask=mask_MH)
        else:
            store_quantized(
                out_ptr, result_MH, row + 0 * head_M, head_M, owned_M, given, quant, HOW,
                NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, BLOCK_M,
            )  # fmt: skip
        if HAS_LSE:
            tl.store(lse_row_ptr + head_M, lse_M * LN_2, mask=owned_M)
    elif SPLIT:
        place = tl.program_id(0).to(tl.int64) * num_splits * HEADS
        part_M = place + split * HEADS + m_M
        part_ptr_MH = part_ptr + (part_M * HEAD_SIZE)[:, None] + h_H[None, :]
        tl.store(part_ptr_MH, result_MH, mask=mask_MH)
        tl.store(part_lse_ptr + part_M, lse_M, mask=owned_M)


@triton.jit
def merge_parts(
    part_ptr,  # of range 0 and the first head; ranges lie STRIDE rows of HEAD_SIZE apart
    part_lse_ptr,
    num_parts,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,  # C: merged at a time
):
    """(out_EH, lse_E in base 2) of HEADS heads: the parts weighted by their log-sum-exp.

    Loads bypass the first-level cache, which another multiprocessor's stores do not reach.
    """
    c_C = tl.arange(0, PARTS)
    e_E = tl.arange(0, PADDED_HEADS)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    top_E = tl.full([PADDED_HEADS], float("-inf"), tl.float32)
    total_E = tl.zeros([PADDED_HEADS], tl.float32)
    acc_EH = tl.zeros([PADDED_HEADS, PADDED_HEAD_SIZE], tl.float32)
    for first in range(0, num_parts, PARTS):
        stored_CE = (first + c_C < num_parts)[:, None] & (e_E < HEADS)[None, :]
        row_CE = ((first + c_C) * STRIDE)[:, None] + e_E[None, :]
        lse_CE = tl.load(
            part_lse_ptr + row_CE, mask=stored_CE, other=float("-inf"), cache_modifier=".cg"
        )
        part_CEH = tl.load(
            part_ptr + (row_CE * HEAD_SIZE)[:, :, None] + h_H[None, None, :],
            mask=stored_CE[:, :, None] & (h_H < HEAD_SIZE)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top_E = tl.maximum(top_E, tl.max(lse_CE, 0))
        base_E = tl.where(new_top_E == float("-inf"), 0.0, new_top_E)
        weight_CE = tl.exp2(lse_CE - base_E[None, :])
        rescale_E = tl.exp2(top_E - base_E)
        total_E = total_E * rescale_E + tl.sum(weight_CE, 0)
        acc_EH = acc_EH * rescale_E[:, None] + tl.sum(weight_CE[:, :, None] * part_CEH, 0)
        top_E = new_top_E
    total_E = tl.where(total_E == 0.0, 1.0, total_E)
    return acc_EH / total_E[:, None], top_E + tl.log2(total_E)


@triton.jit(
    do_not_specialize=["num_splits", "window", "quant"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "lse_ptr"],
)
def combine_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous; quantized, if HOW is given
    part_ptr,  # [S, I, R, HEADS, HEAD_SIZE] float32 contiguous
    part_lse_ptr,  # [S, I, R, HEADS] float32 contiguous, base 2
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    num_splits,  # R
    window,
    lse_ptr,  # [T, N] float32 contiguous, natural log, if HAS_LSE
    quant,  # of `store_quantized`, with HOW
    HOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # of the decode kernel
    PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (S, N): merges one row and head, where the decode kernel has left it to be merged."""
    given = given_scale(quant, HOW)
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) <= row:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    _, _, num_ranges = key_ranges(seq_len, window, num_splits, TILE, HAS_WINDOW)
    if num_ranges <= 1 and HOW is None:
        return
    combine_row(
        out_ptr, part_ptr, part_lse_ptr, lse_ptr, request, row, head, num_ranges, num_splits,
        given, quant, HOW, NUM_HEADS, GROUP, HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, PARTS, HAS_LSE,
    )  # fmt: skip


@triton.jit
def combine_row(
    out_ptr,  # as of `combine_kernel`
    part_ptr,
    part_lse_ptr,
    lse_ptr,
    request,
    row,
    head,
    num_ranges,
    num_splits,
    given,
    quant,
    HOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merges the ranges of one row and head."""
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    in_group = head % GROUP
    item = request.to(tl.int64) * (NUM_HEADS // GROUP * HEAD_TILES)
    item += head // GROUP * HEAD_TILES + in_group // HEADS
    first = item * num_splits * HEADS + in_group % HEADS
    out_EH, lse_E = merge_parts(
        part_ptr + first * HEAD_SIZE, part_lse_ptr + first, num_ranges,
        HEADS, 1, 1, HEAD_SIZE, PADDED_HEAD_SIZE, PARTS,
    )  # fmt: skip
    e_E = tl.arange(0, 1)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    if HOW is None:
        out_ptr_EH = out_ptr + (row * NUM_HEADS + head + e_E)[:, None] * HEAD_SIZE + h_H[None, :]
        tl.store(out_ptr_EH, out_EH.to(out_ptr.dtype.element_ty), mask=(h_H < HEAD_SIZE)[None, :])
    else:
        store_quantized(
            out_ptr, out_EH, row + e_E, head + e_E, e_E < 1, given, quant, HOW,
            NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE, 1,
        )  # fmt: skip
    if HAS_LSE:
        tl.store(lse_ptr + row * NUM_HEADS + head + e_E, lse_E * LN_2)


def empty_parts(
    out: torch.Tensor, num_items: int, num_splits: int, heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """part [S * I, R, E, H] and part_lse [S * I, R, E], float32; stand-ins if one range is all."""
    if num_splits == 1:
        return out, out
    shape = (num_items, num_splits, heads)
    part = torch.empty(*shape, head_size, dtype=torch.float32, device=out.device)
    return part, torch.empty(shape, dtype=torch.float32, device=out.device)


def combine(
    out: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    common: CommonAttentionMetadata,
    window: int | None,
    lse: torch.Tensor | None,
    epilogue: dict[str, Any],
    *,
    group: int,
    tile: int,
) -> None:
    """part [S * I, R, E, H] and part_lse [S * I, R, E] into the requests' rows of out and lse.

    `epilogue`: of `epilogue_arguments`.
    """
    _, num_splits, heads, head_size = part.shape
    padded = padded_head_size(head_size)
    num_parts = min(next_power_of_2(num_splits), max(8192 // padded, 1))
    quick(combine_kernel, (common.num_reqs, out.shape[1]))(
        out,
        part,
        part_lse,
        common.query_start_loc,
        common.seq_lens,
        num_splits,
        window or 0,
        out if lse is None else lse,
        epilogue["quant"],
        HOW=epilogue["HOW"],
        NUM_HEADS=out.shape[1],
        GROUP=group,
        HEADS=heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded,
        TILE=tile,
        PARTS=num_parts,
        HAS_WINDOW=window is not None,
        HAS_LSE=lse is not None,
        num_warps=4,
        **early_launch(out.device),
    )
