"""The loop of single-token queries over their keys.

H head size padded to a power of two, C keys of a tile, P block ids of a tile, M rows of a program.
"""

import triton
import triton.language as tl


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
