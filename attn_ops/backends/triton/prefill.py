"""Attention for any number of query rows per request: one kernel for a whole mixed batch.

A program owns BLOCK_Q query rows of one request and the query heads that share a kv head, stacked
as the rows of its products, so that a key tile is read once for all of them. The grid comes from
shapes alone; which request a program serves it finds in query_start_loc. Batches of few rows cut
the keys into ranges besides, one program each, as single-token decoding does.

T rows, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
P blocks, B block size, C keys of a tile, M rows of a program (BLOCK_Q x HEADS, padded to a power
of two), R ranges of keys.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.prefill_parts import (
    GATHER_ROWS,
    combine_rows,
    empty_row_parts,
    gather_keys,
    rows_per_request,
    store_rows,
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
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.metadata import CommonAttentionMetadata

MAX_SPLIT_ROWS = 64
"""Keys are split if a request's rows, G a query token, are at most so many."""

MIN_TOKENS_PER_SPLIT = 256
"""A shorter range costs more in the combining kernel than it saves."""

PROGRAMS_PER_SM = 4
"""Wanted at least, of programs that split keys."""

MIN_GATHER_QUERIES = 512
"""Query tokens per request from which gathering the keys can pay: it moves each key once."""

MIN_GATHER_PAIRS = 1 << 24
"""Query tokens x keys from which it pays, as its launches take 50 us: at 2048 x 2048 0.50 and not
0.75 of FA3's rate, at 2048 x 16384 0.88 and not 0.74 (one H200, Triton 3.6, 2026-11-21)."""

MIN_GATHER_PAIRS_FP8 = 1 << 22
"""The same for FP8 caches, where it also converts: in place they reach 0.40 of FA3's rate."""

MAX_GATHER_BYTES = 1 << 30
"""Of scratch memory."""


class Launch(NamedTuple):
    """Constants of a launch of the prefill kernel."""

    rows: int  # most rows of a program
    keys: int  # keys of a tile
    num_warps: int  # with all rows; 4 with fewer
    num_stages: int
    heads: int | None = None  # query heads stacked in a program; None: as many as share a kv head
    ahead: bool = True  # block ids are loaded an iteration ahead of their use
    heads_first: bool = False  # order of programs: all heads of some rows before other rows
    gather: bool = False  # keys are gathered into consecutive rows first and read by TMA
    maxnreg: int | None = None  # registers of a thread; None: the compiler's choice
    num_splits: int = 1  # ranges of keys, up to MAX_SPLITS

    def fitted(self, group: int, max_query_len: int) -> tuple[int, int]:
        """(rows, heads) of a program, no larger than the batch needs."""
        heads = min(group, self.heads or group)
        needed = next_power_of_2(max_query_len * heads)
        rows = min(self.rows, max(16, needed))
        return rows, min(heads, rows)

    def constants(self, rows: int) -> dict[str, Any]:
        """The kernel's keyword arguments that do not depend on the batch."""
        registers = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {
            "AHEAD": self.ahead,
            "HEADS_FIRST": self.heads_first,
            "num_warps": self.num_warps if rows == self.rows else 4,
            "num_stages": self.num_stages,
            **registers,
        }


class Keys(NamedTuple):
    """Where a launch finds keys and values."""

    kind: int  # PAGED, DENSE or TMA
    k: torch.Tensor | TensorDescriptor
    v: torch.Tensor | TensorDescriptor
    table: torch.Tensor
    strides: tuple[int, ...]  # the kernel's arguments from stride_block to stride_table
    num_kv_heads: int
    block_size: int = 1


def paged_keys(
    kv_cache: torch.Tensor, common: CommonAttentionMetadata, options: AttentionOptions
) -> Keys:
    """kv_cache [P, 2, B, K, H], read in place."""
    kv = readable(kv_cache, options)
    stride_block, _, stride_token, stride_head, _ = kv.stride()
    table = common.block_table_tensor
    token_and_head = (stride_token, stride_token, stride_head, stride_head)
    strides = (stride_block, *token_and_head, table.stride(0))
    return Keys(PAGED.value, kv[:, 0], kv[:, 1], table, strides, kv.shape[3], kv.shape[2])


def dense_keys(k: torch.Tensor, v: torch.Tensor) -> Keys:
    """k and v [T, K, H], rows as q's."""
    strides = (0, k.stride(0), v.stride(0), k.stride(1), v.stride(1), 0)
    return Keys(DENSE.value, k, v, k, strides, k.shape[1])


def gathered_keys(
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    dtype: torch.dtype,
    tile: int,
) -> Keys:
    """kv_cache [P, 2, B, K, H], copied in `dtype`, and read `tile` keys at a time."""
    assert GATHER_ROWS % tile == 0, f"keys must divide {GATHER_ROWS}, got {tile}"
    kv_2KLH = gather_keys(readable(kv_cache, options), common, dtype)
    _, num_kv_heads, num_rows, head_size = kv_2KLH.shape
    box = [tile, padded_head_size(head_size)]
    k, v = (
        TensorDescriptor(one_KLH, [num_kv_heads * num_rows, head_size], [head_size, 1], box)
        for one_KLH in kv_2KLH
    )
    strides = (0, 0, 0, num_rows, num_rows, rows_per_request(common))
    return Keys(TMA.value, k, v, common.block_table_tensor, strides, num_kv_heads)


def choose_launch(q: torch.Tensor, cache: torch.Tensor, common: CommonAttentionMetadata) -> Launch:
    """For q [T, N, H] and a cache, or keys, of shape [..., K, H].

    The best of a sweep over 65 forms at head size 128: 0.72 to 0.80 of FA3's speed for prompts of
    2,048 to 16,384 tokens (one H200, Triton 3.6, 2026-11-21). Other head sizes are not measured.
    """
    (_, num_heads, head_size), num_kv_heads = q.shape, cache.shape[-2]
    padded = padded_head_size(head_size)
    if padded > 256:  # q alone fills the registers of half as many rows
        large = shared_memory(q.device) >= 132 * 1024
        launch = Launch(64, 16, 8, 2) if large else Launch(32, 16, 8, 1)
        if q.dtype == torch.float32:
            launch = Launch(16, 16, 8, 1)
    elif q.dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        launch = Launch(32, 32, 4, 1) if padded <= 64 else Launch(32, 16, 8, 1)
    elif padded > 128:
        launch = Launch(128 if shared_memory(q.device) >= 132 * 1024 else 64, 32, 8, 3)
    elif gathers(q, cache, common):
        launch = Launch(64, 64, 4, 3, gather=True)
    else:
        launch = Launch(128, 64, 8, 3, heads_first=True)
    num_splits = choose_num_splits(launch, num_heads // num_kv_heads, num_kv_heads, common, q)
    return launch._replace(num_splits=num_splits)


def choose_num_splits(
    launch: Launch,
    group: int,
    num_kv_heads: int,
    common: CommonAttentionMetadata,
    q: torch.Tensor,
) -> int:
    """Ranges that keys are cut into, from host values that a captured graph may freeze."""
    if common.max_query_len * group > MAX_SPLIT_ROWS:
        return 1
    rows, heads = launch.fitted(group, common.max_query_len)
    row_tiles = max(common.num_reqs, 1) * cdiv(common.max_query_len, rows // heads)
    num_programs = row_tiles * num_kv_heads * cdiv(group, heads)
    wanted = cdiv(PROGRAMS_PER_SM * num_sms(q.device), num_programs)
    return max(1, min(wanted, cdiv(common.max_seq_len, MIN_TOKENS_PER_SPLIT), MAX_SPLITS))


def gathers(q: torch.Tensor, cache: torch.Tensor, common: CommonAttentionMetadata) -> bool:
    """Whether keys are worth gathering; a captured launch keeps its scratch in the graph's pool."""
    if not has_tma(q.device) or common.num_reqs == 0:
        return False
    num_bytes = 2 * common.num_reqs * rows_per_request(common) * cache.shape[-2:].numel()
    pairs = MIN_GATHER_PAIRS if cache.dtype == q.dtype else MIN_GATHER_PAIRS_FP8
    enough = q.shape[0] >= max(
        MIN_GATHER_QUERIES * common.num_reqs, pairs / max(common.max_seq_len, 1)
    )
    return enough and num_bytes * q.dtype.itemsize <= MAX_GATHER_BYTES


# Cached: a property of the device, asked by each launch.
@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU; how the kernel runs on later ones is not measured."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


# Cached: a property of the device, asked by each launch.
@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on `device`; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


PAGED = tl.constexpr(0)
"""Keys lie in blocks; a row of the block table names them."""

DENSE = tl.constexpr(1)
"""A request's keys are consecutive rows."""

TMA = tl.constexpr(2)
"""As DENSE, but read through tensor descriptors, [TILE, H] at a time and without masks: what lies
behind a request's keys up to the end of a tile must be finite."""

PAGED_TMA = tl.constexpr(3)
"""As PAGED, but read through tensor descriptors of all rows of the cache, [rows, K * H]. Blocks are
multiples of TILE; every key of the tiles must be one of the request's."""


@triton.jit
def load_blocks(table_ptr, start, seq_len, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Physical block of each key from `start`, a multiple of TILE; one for all if a tile fits one.

    Keys past seq_len, whose entries may be anything, get block 0.
    """
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < seq_len, other=0)
    else:
        key_C = start + tl.arange(0, TILE)
        block = tl.load(table_ptr + key_C // BLOCK_SIZE, mask=key_C < seq_len, other=0)
    return block.to(tl.int64)


@triton.jit
def listed_key(columns_ptr, place, end, LISTED: tl.constexpr):
    """The key at `place` of those in listed blocks of LISTED keys; of block 0 from `end` on."""
    column = tl.load(columns_ptr + place // LISTED, mask=place < end, other=0)
    return column * LISTED + place % LISTED


@triton.jit
def attend_keys(
    acc_MH,
    max_M,
    sum_M,
    q_MH,  # its dtype is that of the products
    position_M,  # of each row in its sequence
    slope_M,  # of ALiBi, base 2, if HAS_ALIBI
    k_source,  # this kv head's keys: a pointer; a descriptor if TMA
    v_source,
    table_ptr,  # the request's row of the block table, if PAGED
    first_row,  # of the request's keys in k_source, if TMA; if PAGED_TMA the head's first column
    seq_len,
    begin,  # keys begin..end are visited; begin is a multiple of TILE
    end,
    stride_block,  # if PAGED_TMA: rows of a block
    stride_k_token,
    stride_v_token,
    score_scale,
    soft_cap,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,  # PAGED, DENSE, TMA or PAGED_TMA
    AHEAD: tl.constexpr,  # block ids are loaded an iteration ahead of their use
    CAUSAL: tl.constexpr,  # keys behind a row's position are masked
    HAS_WINDOW: tl.constexpr,
    HAS_RIGHT_WINDOW: tl.constexpr,  # the window is symmetric
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    FUSED: tl.constexpr,  # score_scale is above 0 and nothing else changes scores: maxima scale too
    MASKED: tl.constexpr,  # False: the caller knows that every row sees every key of begin..end
    columns_ptr=None,  # blocks that are visited, if LISTED: begin..end are places among their keys
    LISTED: tl.constexpr = 0,  # keys of a listed block, a multiple of TILE; 0: no list
    STAGES: tl.constexpr = None,  # of the loop; None: of the kernel
    VECTOR: tl.constexpr = 1,  # divides every stride of the keys
):
    """Base 2, float32: acc_MH (not normalized), max_M, sum_M."""
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    c_C = tl.arange(0, TILE)
    if HEAD_SIZE == PADDED_HEAD_SIZE:  # a constant mask: the load is then unpredicated
        stored_H = tl.full([PADDED_HEAD_SIZE], 1, tl.int1)
    else:
        stored_H = h_H < HEAD_SIZE
    if LISTED:
        next_start = listed_key(columns_ptr, begin, end, LISTED)
        first = next_start
    else:
        first = begin
    if KEYS == PAGED or KEYS == PAGED_TMA:
        block_C = load_blocks(table_ptr, first, seq_len, BLOCK_SIZE, TILE)
    for place in tl.range(begin, end, TILE, num_stages=STAGES):
        if LISTED:
            start = next_start
            next_start = listed_key(columns_ptr, place + TILE, end, LISTED)
            behind = next_start
        else:
            start = place
            behind = place + TILE
        key_C = start + c_C
        # Slots past seq_len may hold NaN, which a zero weight would not
        # silence: they are never loaded.
        if MASKED:
            valid_C = key_C < seq_len
        else:
            valid_C = tl.full([TILE], 1, tl.int1)
        if KEYS == TMA:
            k_CH = k_source.load([first_row + start, 0])
        elif KEYS == PAGED_TMA:
            row = (block_C * stride_block + start % BLOCK_SIZE).to(tl.int32)
            block_C = load_blocks(table_ptr, behind, seq_len, BLOCK_SIZE, TILE)
            k_CH = k_source.load([row, first_row])
        else:
            if KEYS == PAGED:
                if not AHEAD:
                    block_C = load_blocks(table_ptr, start, seq_len, BLOCK_SIZE, TILE)
                k_offset_C = block_C * stride_block + (key_C % BLOCK_SIZE) * stride_k_token
                v_offset_C = k_offset_C
                if AHEAD:
                    block_C = load_blocks(table_ptr, behind, seq_len, BLOCK_SIZE, TILE)
            else:
                k_offset_C = key_C.to(tl.int64) * stride_k_token
                v_offset_C = key_C.to(tl.int64) * stride_v_token
            k_offset_C = tl.multiple_of(k_offset_C, VECTOR)  # Triton sees multiples of 16 alone
            v_offset_C = tl.multiple_of(v_offset_C, VECTOR)
            mask_CH = valid_C[:, None] & stored_H[None, :]
            k_CH = tl.load(k_source + k_offset_C[:, None] + h_H[None, :], mask=mask_CH, other=0.0)
        score_MC = tl.dot(q_MH, tl.trans(k_CH.to(q_MH.dtype)), input_precision="ieee")
        if not FUSED:
            score_MC *= score_scale
        if HAS_SOFT_CAP:  # soft_cap * tanh(x); score_scale holds 2 * log2(e) of tanh's exponential
            score_MC = soft_cap * (1.0 - 2.0 / (tl.exp2(score_MC) + 1.0))
        if HAS_ALIBI:  # in float32, which is exact below 2 ** 24
            distance_MC = position_M.to(tl.float32)[:, None] - key_C.to(tl.float32)[None, :]
            score_MC -= slope_M[:, None] * tl.abs(distance_MC)
        if MASKED:
            visible_MC = valid_C[None, :]
            if CAUSAL:
                visible_MC = visible_MC & (key_C[None, :] <= position_M[:, None])
            if HAS_WINDOW:
                visible_MC = visible_MC & (key_C[None, :] > position_M[:, None] - window)
            if HAS_RIGHT_WINDOW:
                visible_MC = visible_MC & (key_C[None, :] - window < position_M[:, None])
            score_MC = tl.where(visible_MC, score_MC, float("-inf"))
        if FUSED:
            new_max_M = tl.maximum(max_M, tl.max(score_MC, 1) * score_scale)
        else:
            new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        if FUSED:  # scaling and subtraction in one FMA
            weight_MC = tl.exp2(score_MC * score_scale - base_M[:, None])
        else:
            weight_MC = tl.exp2(score_MC - base_M[:, None])
        rescale_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_MC, 1)
        if KEYS == TMA:
            v_CH = v_source.load([first_row + start, 0])
        elif KEYS == PAGED_TMA:
            v_CH = v_source.load([row, first_row])
        else:
            v_CH = tl.load(v_source + v_offset_C[:, None] + h_H[None, :], mask=mask_CH, other=0.0)
        acc_MH = tl.dot(
            weight_MC.to(q_MH.dtype),
            v_CH.to(q_MH.dtype),
            acc_MH * rescale_M[:, None],
            input_precision="ieee",
        )
        max_M = new_max_M
    return acc_MH, max_M, sum_M


CHANGES_SCORES = ("HAS_SOFT_CAP", "HAS_ALIBI", "HAS_K_SCALE")
"""Flags of what stands between a product and its maximum, or may have any sign."""


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
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_splits", "window"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "part_lse_ptr",
        "alibi_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "lse_ptr",
    ],
)  # fmt: skip
def prefill_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous; if SPLIT [T, N, R, HEAD_SIZE] float32
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
        num_splits, v_scale_ptr, NUM_HEADS, HEAD_SIZE, PADDED_HEAD_SIZE,
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

    Of the batch's ints max_query_len and max_seq_len are read; both must bound the batch's lengths,
    in a captured launch those of every replay. `launch` overrides the choice.
    """
    launch = launch or choose_launch(q, kv_cache, common)
    if launch.gather:
        keys = gathered_keys(kv_cache, common, options, q.dtype, launch.keys)
    else:
        keys = paged_keys(kv_cache, common, options)
    return _attend(q, keys, common, options, launch)


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
    split = launch.num_splits > 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part, part_lse = empty_row_parts(out, q.shape, launch.num_splits)
    arguments, flags = option_arguments(options, unused=out)
    num_head_tiles = keys.num_kv_heads * cdiv(group, heads)
    num_row_tiles = num_rows // (block_m // heads) + common.num_reqs + 1
    quick(prefill_kernel, (num_row_tiles * num_head_tiles, launch.num_splits))(
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
        combine_rows(out, part, part_lse, options.lse)
    return out
