"""Streaming softmax over the keys of one request, wherever they lie: the loop of prefill.

H head size padded to a power of two, B block size, C keys of a tile, M rows of a program.
"""

import triton
import triton.language as tl

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
