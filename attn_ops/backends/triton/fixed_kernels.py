"""Kernels of TRITON_FIXED: a row gets the same bits, whatever else is in its batch.

A sequence's keys lie in units at fixed places. Within a unit, tiles of one size are summed from
nothing, in order. Units are then merged one after the other, by a program that has computed them
all or by a second kernel: the operations of a row are the same in both.

T rows, S requests, N query heads, K kv heads, G = N // K, H head size padded to a power of two,
C keys of a tile, M rows of a program (query rows x HEADS), U units.
"""

import triton
import triton.language as tl

from attn_ops.backends.triton.prefill import find_request, load_blocks
from attn_ops.backends.triton.tiles import LOG2_E
from attn_ops.early_launch.triton.launch import wait_for_inputs

UNIT = tl.constexpr(256)
"""Keys of a unit: a range that one program reads in a decode of few requests."""

LATE = tl.constexpr(2048)
"""From this key on, a unit is twice as long: few parts are merged, and still enough programs run.
A decode of 1 x 32k takes 1.08 of TRITON's time so, and 1.56 with 256 throughout (H100,
2026-11-26)."""

SUMS = tl.constexpr(16)
"""Columns of a product that sums weights: the fewest that tensor cores take."""

AHEAD = tl.constexpr(8)
"""Parts that the second kernel loads at a time: one by one it would wait for each."""


@triton.jit
def first_key(unit):
    """Of a unit."""
    EARLY: tl.constexpr = LATE // UNIT
    return tl.minimum(unit, EARLY) * UNIT + tl.maximum(unit - EARLY, 0) * (2 * UNIT)


@triton.jit
def unit_of(key):
    """The unit in which a key lies."""
    return tl.minimum(key, LATE) // UNIT + tl.maximum(key - LATE, 0) // (2 * UNIT)


@triton.jit
def tile_offsets(
    block,
    start,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """[C] where the keys of a tile lie, whose blocks `tile_blocks` has found."""
    key_C = start + tl.arange(0, TILE)
    base = block * stride_block
    if BLOCK_SIZE % TILE != 0 and TILE % BLOCK_SIZE == 0:  # an id a block
        PAGES: tl.constexpr = TILE // BLOCK_SIZE
        base = tl.broadcast_to(base[:, None], [PAGES, BLOCK_SIZE]).reshape(TILE)
    offset_C = base + key_C % BLOCK_SIZE * stride_token
    return tl.multiple_of(offset_C, VECTOR)  # said here: of a call's result it would be lost


@triton.jit
def tile_blocks(table_ptr, start, seq_len, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Physical blocks of the tile at `start`: an id each where it is several whole blocks."""
    if BLOCK_SIZE % TILE != 0 and TILE % BLOCK_SIZE == 0:
        page_P = start // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
        block = tl.load(table_ptr + page_P, mask=page_P * BLOCK_SIZE < seq_len, other=0)
        block = block.to(tl.int64)
    else:
        block = load_blocks(table_ptr, start, seq_len, BLOCK_SIZE, TILE)
    return block


@triton.jit
def merged_unit(acc, max, sum, unit_acc, unit_max, unit_sum):
    """A row's state after one more unit; acc has one dimension more than max and sum."""
    new_max = tl.maximum(max, unit_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(max - base)
    weight = tl.exp2(unit_max - base)
    acc = tl.fma(acc, tl.expand_dims(rescale, -1), unit_acc * tl.expand_dims(weight, -1))
    return acc, new_max, tl.fma(sum, rescale, unit_sum * weight)


@triton.jit
def follow_units(
    acc_MH,  # with max_M and sum_M, the state of the units before
    max_M,
    sum_M,
    unit_begin,
    unit_end,
    part_ptr,  # as of `fixed_kernel`, if SPLIT
    max_ptr,
    sum_ptr,
    place_M,  # of each row and head
    owned_M,
    num_rows,
    q_MH,  # its dtype is that of the products
    position_M,  # of each row in its sequence
    k_ptr,  # of this kv head, at physical block 0
    v_ptr,
    table_ptr,  # the request's row of the block table
    seq_len,
    begin,  # some row sees keys begin..end
    end,
    stride_block,
    stride_token,
    score_scale,
    soft_cap,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    FUSED: tl.constexpr,  # score_scale is above 0 and nothing else changes scores
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key
):
    """The state after some units, base 2, float32; if SPLIT each goes to memory and it stays.

    The kernel is compiled without contraction: products and sums are one operation where it says
    `tl.fma`, and nowhere else. A tile of which a row sees nothing changes no bit of it. Tiles of
    all units are one loop: loads of the next unit are under way while this one ends.
    """
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    unit_acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)  # of this unit alone
    unit_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    unit_sum_MS = tl.zeros([BLOCK_M, SUMS], tl.float32)
    one_CS = tl.full([TILE, SUMS], 1.0, q_MH.dtype)
    if HEAD_SIZE == PADDED_HEAD_SIZE:  # a constant mask: the load is then unpredicated
        stored_H = tl.full([PADDED_HEAD_SIZE], 1, tl.int1)
    else:
        stored_H = h_H < HEAD_SIZE
    first = first_key(unit_begin)
    last = first_key(unit_end)
    if HAS_WINDOW:
        first = tl.maximum(first, begin // TILE * TILE)
    if MASKED:
        last = tl.minimum(last, end)
    next_block = tile_blocks(table_ptr, first, seq_len, BLOCK_SIZE, TILE)
    for start in range(first, last, TILE):
        block = next_block  # keys wait for one load and not for two
        next_block = tile_blocks(table_ptr, start + TILE, seq_len, BLOCK_SIZE, TILE)
        key_C = start + tl.arange(0, TILE)
        offset_C = tile_offsets(block, start, stride_block, stride_token, BLOCK_SIZE, TILE, VECTOR)
        if MASKED:  # slots past seq_len may hold NaN, which a weight of zero would not silence
            loaded_CH = (key_C < seq_len)[:, None] & stored_H[None, :]
        else:
            loaded_CH = tl.broadcast_to(stored_H[None, :], [TILE, PADDED_HEAD_SIZE])
        k_CH = tl.load(k_ptr + offset_C[:, None] + h_H[None, :], mask=loaded_CH, other=0.0)
        score_MC = tl.dot(q_MH, tl.trans(k_CH.to(q_MH.dtype)), input_precision="ieee")
        if not FUSED:
            score_MC *= score_scale
        if HAS_SOFT_CAP:  # soft_cap * tanh(x); score_scale holds 2 * log2(e) of tanh's exponential
            score_MC = soft_cap * (1.0 - 2.0 / (tl.exp2(score_MC) + 1.0))
        if MASKED:
            visible_MC = key_C[None, :] <= position_M[:, None]
            if HAS_WINDOW:
                visible_MC = visible_MC & (key_C[None, :] > position_M[:, None] - window)
            score_MC = tl.where(visible_MC, score_MC, float("-inf"))
        top_M = tl.max(score_MC, 1)
        if FUSED:
            top_M *= score_scale
        new_max_M = tl.maximum(unit_max_M, top_M)
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        if FUSED:
            weight_MC = tl.exp2(tl.fma(score_MC, score_scale, -base_M[:, None]))
        else:
            weight_MC = tl.exp2(score_MC - base_M[:, None])
        rescale_M = tl.exp2(unit_max_M - base_M)
        v_CH = tl.load(v_ptr + offset_C[:, None] + h_H[None, :], mask=loaded_CH, other=0.0)
        factor_MC = weight_MC.to(q_MH.dtype)
        # Summed as a product, in the order of keys: `tl.sum` has the order of a layout, which
        # depends on rows and warps.
        unit_sum_MS = tl.dot(
            factor_MC, one_CS, unit_sum_MS * rescale_M[:, None], input_precision="ieee"
        )
        unit_acc_MH = tl.dot(
            factor_MC, v_CH.to(q_MH.dtype), unit_acc_MH * rescale_M[:, None],
            input_precision="ieee",
        )  # fmt: skip
        unit_max_M = new_max_M
        unit = unit_of(start)
        if (unit_of(start + TILE) != unit) | (start + TILE >= last):  # the unit ends
            unit_sum_M = tl.max(unit_sum_MS, 1)  # its columns are equal
            if SPLIT:
                part_M = unit * num_rows.to(tl.int64) * NUM_HEADS + place_M
                part_ptr_MH = part_ptr + (part_M * HEAD_SIZE)[:, None] + h_H[None, :]
                mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
                tl.store(part_ptr_MH, unit_acc_MH, mask=mask_MH)
                tl.store(max_ptr + part_M, unit_max_M, mask=owned_M)
                tl.store(sum_ptr + part_M, unit_sum_M, mask=owned_M)
            else:
                acc_MH, max_M, sum_M = merged_unit(
                    acc_MH, max_M, sum_M, unit_acc_MH, unit_max_M, unit_sum_M
                )
            unit_acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
            unit_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
            unit_sum_MS = tl.zeros([BLOCK_M, SUMS], tl.float32)
    return acc_MH, max_M, sum_M


@triton.jit
def before_units(sinks_ptr, head_M, counted_M, M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """max_M and sum_M before the first unit, base 2: nothing, or the sink of counted_M."""
    max_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        sink_M = tl.load(sinks_ptr + head_M, mask=counted_M, other=float("-inf"))
        max_M = sink_M.to(tl.float32) * LOG2_E
        sum_M = tl.where(counted_M, 1.0, 0.0)
    return max_M, sum_M


@triton.jit
def store_row(
    out_ptr_MH,
    acc_MH,
    sum_M,
    v_scale_ptr,
    mask_MH,
    HAS_V_SCALE: tl.constexpr,
):
    """acc_MH, normalized, to the output; zero where there was no key."""
    out_MH = acc_MH / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    if HAS_V_SCALE:
        out_MH *= tl.load(v_scale_ptr)
    tl.store(out_ptr_MH, out_MH.to(out_ptr_MH.dtype.element_ty), mask=mask_MH)


@triton.jit(
    do_not_specialize=["stride_table", "num_reqs", "num_rows", "num_units", "window"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "table_ptr", "sinks_ptr", "k_scale_ptr",
        "v_scale_ptr",
    ],
)  # fmt: skip
def fixed_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous; if SPLIT parts [U, T, N, HEAD_SIZE] float32
    max_ptr,  # [U, T, N] float32 contiguous, base 2, if SPLIT
    sum_ptr,  # [U, T, N] float32 contiguous, if SPLIT
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
    num_units,  # U: of the longest sequence
    score_scale,
    soft_cap,
    window,
    sinks_ptr,  # [N] float32 or q's dtype, if HAS_SINKS
    k_scale_ptr,  # [1] float32, if HAS_K_SCALE
    v_scale_ptr,  # [1] float32, if HAS_V_SCALE
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # G
    HEADS: tl.constexpr,  # query heads per program, at most G
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,  # divides every stride of the cache
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    FUSED: tl.constexpr,
    WIDEN: tl.constexpr,  # q in float32
    SPLIT: tl.constexpr,
    FEW: tl.constexpr,  # rows of a request that count as few; 0: all are computed alike
    IS_FEW: tl.constexpr,  # of requests with few rows alone; else of the others alone
    PDL: tl.constexpr,  # launched early
):
    """Grid ((T // BLOCK_Q + S + 1) * K * ceil(G / HEADS), ranges of units)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    NUM_HEAD_TILES: tl.constexpr = NUM_HEADS // GROUP * HEAD_TILES
    wait_for_inputs(PDL)
    num_row_tiles = tl.num_programs(0) // NUM_HEAD_TILES
    head_program = tl.program_id(0) % NUM_HEAD_TILES
    program = num_row_tiles - 1 - tl.program_id(0) // NUM_HEAD_TILES  # late rows see most keys
    kv_head = head_program // HEAD_TILES
    # Rows behind the last request are request S, whose sequence is empty.
    request = find_request(query_start_loc_ptr, program, num_reqs, BLOCK_Q)
    row_begin = tl.load(query_start_loc_ptr + request)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_reqs, other=num_rows)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    query_len = row_end - row_begin
    first = (program - row_begin // BLOCK_Q - request) * BLOCK_Q
    if first >= query_len:
        return
    if FEW > 0:
        if ((query_len <= FEW) & (request < num_reqs)) != IS_FEW:
            return

    m_M = tl.arange(0, BLOCK_M)
    query_M = first + m_M // HEADS
    in_group_M = head_program % HEAD_TILES * HEADS + m_M % HEADS
    head_M = kv_head * GROUP + in_group_M
    row_M = (row_begin + query_M).to(tl.int64)
    owned_M = (m_M < BLOCK_Q * HEADS) & (query_M < query_len) & (in_group_M < GROUP)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    q_ptr_MH = q_ptr + (row_M * stride_q_row + head_M * stride_q_head)[:, None] + h_H[None, :]
    q_MH = tl.load(q_ptr_MH, mask=mask_MH, other=0.0)
    if WIDEN:
        q_MH = q_MH.to(tl.float32)
    if HAS_K_SCALE:
        score_scale *= tl.load(k_scale_ptr)

    first_position = seq_len - query_len + first
    position_M = first_position + m_M // HEADS
    last_position = seq_len - query_len + tl.minimum(first + BLOCK_Q, query_len) - 1
    begin = 0  # of the keys that some row sees
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
    end = last_position + 1
    unit_begin = unit_of(begin)
    unit_end = tl.where(end > begin, unit_of(tl.maximum(last_position, 0)) + 1, unit_begin)
    if SPLIT:
        length = tl.cdiv(unit_end - unit_begin, tl.num_programs(1))
        unit_begin += tl.program_id(1) * length
        unit_end = tl.minimum(unit_begin + length, unit_end)

    k_ptr = kv_ptr + tl.multiple_of(kv_head.to(tl.int64) * stride_kv_head, VECTOR)
    v_ptr = k_ptr + stride_kv
    table_ptr += request.to(tl.int64) * stride_table
    acc_MH = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
    max_M, sum_M = before_units(sinks_ptr, head_M, owned_M & (seq_len > 0), BLOCK_M, HAS_SINKS)
    place_M = row_M * NUM_HEADS + head_M
    unit_masked = unit_begin  # of the units in front of it every row sees every key
    if not HAS_WINDOW:
        unit_masked = unit_of(tl.maximum(first_position + 1, 0))
        unit_masked = tl.minimum(tl.maximum(unit_masked, unit_begin), unit_end)
        acc_MH, max_M, sum_M = follow_units(
            acc_MH, max_M, sum_M, unit_begin, unit_masked, out_ptr, max_ptr, sum_ptr, place_M,
            owned_M, num_rows, q_MH, position_M, k_ptr, v_ptr, table_ptr, seq_len, begin, end,
            stride_block, stride_token, score_scale, soft_cap, window, NUM_HEADS, HEAD_SIZE,
            PADDED_HEAD_SIZE, BLOCK_SIZE, BLOCK_M, TILE, VECTOR, HAS_WINDOW, HAS_SOFT_CAP, FUSED,
            SPLIT, MASKED=False,
        )  # fmt: skip
    acc_MH, max_M, sum_M = follow_units(
        acc_MH, max_M, sum_M, unit_masked, unit_end, out_ptr, max_ptr, sum_ptr, place_M,
        owned_M, num_rows, q_MH, position_M, k_ptr, v_ptr, table_ptr, seq_len, begin, end,
        stride_block, stride_token, score_scale, soft_cap, window, NUM_HEADS, HEAD_SIZE,
        PADDED_HEAD_SIZE, BLOCK_SIZE, BLOCK_M, TILE, VECTOR, HAS_WINDOW, HAS_SOFT_CAP, FUSED,
        SPLIT, MASKED=True,
    )  # fmt: skip
    if not SPLIT:
        out_ptr_MH = out_ptr + (place_M * HEAD_SIZE)[:, None] + h_H[None, :]
        store_row(out_ptr_MH, acc_MH, sum_M, v_scale_ptr, mask_MH, HAS_V_SCALE)


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "num_units", "window"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr", "seq_lens_ptr", "sinks_ptr", "v_scale_ptr",
    ],
)  # fmt: skip
def merge_units_kernel(
    out_ptr,  # [T, N, HEAD_SIZE] contiguous
    part_ptr,  # [U, T, N, HEAD_SIZE] float32 contiguous
    max_ptr,  # [U, T, N] float32 contiguous, base 2
    sum_ptr,  # [U, T, N] float32 contiguous
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    num_reqs,
    num_rows,  # T
    num_units,  # U
    window,
    sinks_ptr,  # [N], if HAS_SINKS
    v_scale_ptr,  # [1] float32, if HAS_V_SCALE
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T, N): the units that a row sees, in order, as `fixed_kernel` would have merged them.

    Units behind the row's last key count as nothing, as there.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head_1 = tl.program_id(1) + tl.arange(0, 1)
    request = find_request(query_start_loc_ptr, tl.program_id(0), num_reqs, 1, MORE=0)
    row_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_reqs, other=num_rows)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    position = seq_len - row_end + tl.program_id(0)
    unit_begin = 0
    if HAS_WINDOW:
        unit_begin = unit_of(tl.maximum(position - window + 1, 0))
    unit_end = tl.where(seq_len > 0, unit_of(tl.maximum(position, 0)) + 1, unit_begin)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    stored_H = h_H < HEAD_SIZE
    acc_1H = tl.zeros([1, PADDED_HEAD_SIZE], tl.float32)
    counted_1 = (seq_len > 0) & (head_1 < NUM_HEADS)
    max_1, sum_1 = before_units(sinks_ptr, head_1, counted_1, 1, HAS_SINKS)
    place_1 = row * NUM_HEADS + head_1
    for begin in range(unit_begin, unit_end, AHEAD):
        for more in tl.static_range(AHEAD):
            there = begin + more < unit_end
            part_1 = (begin + more) * num_rows.to(tl.int64) * NUM_HEADS + place_1
            part_max_1 = tl.load(max_ptr + part_1, mask=there, other=float("-inf"))
            part_sum_1 = tl.load(sum_ptr + part_1, mask=there, other=0.0)
            part_ptr_1H = part_ptr + (part_1 * HEAD_SIZE)[:, None] + h_H[None, :]
            part_1H = tl.load(part_ptr_1H, mask=there & stored_H[None, :], other=0.0)
            acc_1H, max_1, sum_1 = merged_unit(
                acc_1H, max_1, sum_1, part_1H, part_max_1, part_sum_1
            )
    out_ptr_1H = out_ptr + (place_1 * HEAD_SIZE)[:, None] + h_H[None, :]
    store_row(out_ptr_1H, acc_1H, sum_1, v_scale_ptr, stored_H[None, :], HAS_V_SCALE)
