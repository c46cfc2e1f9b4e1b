"""The loop of latent attention over its keys: a tile of the cache is both keys and values.

H half of the latent, padded to a power of two, E rotated columns padded likewise, C keys of a tile,
M rows of a program.
"""

import triton
import triton.language as tl

from attn_ops.backends.triton.decode import tile_blocks


@triton.jit
def halves(x):
    """float16 that has passed an empty instruction, behind which its conversion cannot move.

    Else shared memory is read in single bytes (attn_ops/backends/triton/decode.py).
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
    )


@triton.jit
def cached(ptr, mask_C, dtype: tl.constexpr, STAGED: tl.constexpr):
    """Columns of a tile of the cache, in the dtype of the products."""
    x = tl.load(ptr, mask=mask_C, other=0.0).to(dtype)
    if STAGED:
        x = halves(x)
    return x


@triton.jit
def attend_latents(
    acc0,  # [M, H] float32; [H, M], if SWAP
    acc1,
    max_M,
    sum_M,
    q_M0,  # [M, H]: the first half of the latent's columns; its dtype is that of the products
    q_M1,
    q_ME,
    kv_ptr,  # of physical block 0
    table_ptr,  # the request's row of the block table
    visible_M,  # keys that a row sees, from the first
    last,  # the request's last key
    begin,  # keys begin..end are visited; begin is a multiple of TILE
    end,
    stride_block,
    stride_token,
    scale_M,
    LATENT: tl.constexpr,
    HALF_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    DRAFTS: tl.constexpr,  # rows see different keys
    STAGED: tl.constexpr,
    SWAP: tl.constexpr,
    CHAINS: tl.constexpr,  # 2: the halves' products do not wait for each other
    LATE_SUM: tl.constexpr,  # weights are summed over keys behind the loop: warps share a row
):
    """Streaming softmax over key tiles, base 2, float32: acc0, acc1 (not normalized), max_M, sum_M.

    With SWAP products are transposed: keys are their rows, so that few query rows are columns of
    warp group instructions, which take no fewer than 64 rows. Keys past the last one are loaded as
    the last one, with weight zero: slots past seq_len may hold NaN.
    """
    PAGES: tl.constexpr = TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1
    h_H = tl.arange(0, HALF_LATENT)
    e_E = tl.arange(0, PADDED_ROPE)
    if LATENT == 2 * HALF_LATENT:  # constant masks: the loads are then unpredicated
        stored0_H = tl.full([HALF_LATENT], 1, tl.int1)
        stored1_H = tl.full([HALF_LATENT], 1, tl.int1)
    else:
        stored0_H = h_H < LATENT
        stored1_H = HALF_LATENT + h_H < LATENT
    if ROPE == PADDED_ROPE:
        rope_E = tl.full([PADDED_ROPE], 1, tl.int1)
    else:
        rope_E = e_E < ROPE
    mask_C0 = tl.broadcast_to(stored0_H[None, :], [TILE, HALF_LATENT])
    mask_C1 = tl.broadcast_to(stored1_H[None, :], [TILE, HALF_LATENT])
    mask_CE = tl.broadcast_to(rope_E[None, :], [TILE, PADDED_ROPE])
    if LATE_SUM:
        if SWAP:
            sums = tl.zeros([TILE, sum_M.shape[0]], tl.float32)
        else:
            sums = tl.zeros([sum_M.shape[0], TILE], tl.float32)
    else:
        sums = sum_M
    next_P = tile_blocks(table_ptr, begin, last, TILE, BLOCK_SIZE)
    for start in range(begin, end, TILE):
        block_P = next_P  # keys of the next tile will wait for one load and not for two
        next_P = tile_blocks(table_ptr, start + TILE, last, TILE, BLOCK_SIZE)
        key_C = start + tl.arange(0, TILE)
        base_P = block_P.to(tl.int64) * stride_block
        base_C = tl.broadcast_to(base_P[:, None], [PAGES, TILE // PAGES]).reshape(TILE)
        offset_C = base_C + tl.minimum(key_C, last) % BLOCK_SIZE * stride_token
        offset_C = tl.multiple_of(offset_C, VECTOR)
        ptr_CH = kv_ptr + (offset_C[:, None] + h_H[None, :])
        ptr_CE = kv_ptr + LATENT + (offset_C[:, None] + e_E[None, :])
        c_C0 = cached(ptr_CH, mask_C0, q_M0.dtype, STAGED)
        c_C1 = cached(ptr_CH + HALF_LATENT, mask_C1, q_M0.dtype, STAGED)
        e_CE = cached(ptr_CE, mask_CE, q_M0.dtype, False)
        if SWAP:
            score_CM = tl.dot(e_CE, tl.trans(q_ME), input_precision="ieee")
            score_CM = tl.dot(c_C0, tl.trans(q_M0), score_CM, input_precision="ieee")
            score_CM = tl.dot(c_C1, tl.trans(q_M1), score_CM, input_precision="ieee")
            score_CM *= scale_M[None, :]
            score_CM = tl.where(key_C[:, None] < visible_M[None, :], score_CM, float("-inf"))
            new_max_M = tl.maximum(max_M, tl.max(score_CM, 0))
        else:
            score_MC = tl.dot(q_ME, tl.trans(e_CE), input_precision="ieee")
            score_MC = tl.dot(q_M0, tl.trans(c_C0), score_MC, input_precision="ieee")
            if CHAINS == 2:  # scaled before it is added: the compiler would chain a bare sum
                other_MC = tl.dot(q_M1, tl.trans(c_C1), input_precision="ieee")
                score_MC = score_MC * scale_M[:, None] + other_MC * scale_M[:, None]
            else:
                score_MC = tl.dot(q_M1, tl.trans(c_C1), score_MC, input_precision="ieee")
                score_MC *= scale_M[:, None]
            score_MC = tl.where(key_C[None, :] < visible_M[:, None], score_MC, float("-inf"))
            new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if DRAFTS:  # a row that sees none of these keys: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        rescale_M = tl.exp2(max_M - base_M)
        if SWAP:
            weight_CM = tl.exp2(score_CM - base_M[None, :])
            sums = sums * rescale_M[None, :] + weight_CM
            w_CM = weight_CM.to(q_M0.dtype)
            acc0 *= rescale_M[None, :]
            acc1 *= rescale_M[None, :]
            acc0 = tl.dot(tl.trans(c_C0), w_CM, acc0, input_precision="ieee")
            acc1 = tl.dot(tl.trans(c_C1), w_CM, acc1, input_precision="ieee")
        else:
            weight_MC = tl.exp2(score_MC - base_M[:, None])
            if LATE_SUM:
                sums = sums * rescale_M[:, None] + weight_MC
            else:
                sums = sums * rescale_M + tl.sum(weight_MC, 1)
            w_MC = weight_MC.to(q_M0.dtype)
            acc0 *= rescale_M[:, None]
            acc1 *= rescale_M[:, None]
            acc0 = tl.dot(w_MC, c_C0, acc0, input_precision="ieee")
            acc1 = tl.dot(w_MC, c_C1, acc1, input_precision="ieee")
        max_M = new_max_M
    if LATE_SUM:
        sum_M = tl.sum(sums, 0 if SWAP else 1)
    else:
        sum_M = sums
    return acc0, acc1, max_M, sum_M
