"""The loop of latent attention over its keys: a tile of the cache is both keys and values.

L latent padded to a power of two, E rotated columns padded likewise, C keys of a tile, M rows of a
program.
"""

import triton
import triton.language as tl

from attn_ops.backends.triton.decode_loop import tile_blocks


@triton.jit
def halves(x):
    """float16 that has passed an empty instruction, behind which its conversion cannot move.

    Else shared memory is read in single bytes (attn_ops/backends/triton/decode_loop.py).
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
    )


@triton.jit
def attend_latents(
    acc,  # [M, L] float32; [L, M], if SWAP
    max_M,
    sum_M,
    q_ML,  # its dtype is that of the products
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
    PADDED_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    DRAFTS: tl.constexpr,  # rows see different keys
    STAGED: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Streaming softmax over key tiles, base 2, float32: acc (not normalized), max_M, sum_M.

    With SWAP products are transposed: keys are their rows, so that few query rows are columns of
    warp group instructions, which take no fewer than 64 rows. Keys past the last one are loaded as
    the last one, with weight zero: slots past seq_len may hold NaN.
    """
    PAGES: tl.constexpr = TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1
    l_L = tl.arange(0, PADDED_LATENT)
    e_E = tl.arange(0, PADDED_ROPE)
    if LATENT == PADDED_LATENT:  # a constant mask: the load is then unpredicated
        latent_L = tl.full([PADDED_LATENT], 1, tl.int1)
    else:
        latent_L = l_L < LATENT
    if ROPE == PADDED_ROPE:
        rope_E = tl.full([PADDED_ROPE], 1, tl.int1)
    else:
        rope_E = e_E < ROPE
    next_P = tile_blocks(table_ptr, begin, last, TILE, BLOCK_SIZE)
    for start in range(begin, end, TILE):
        block_P = next_P  # keys of the next tile will wait for one load and not for two
        next_P = tile_blocks(table_ptr, start + TILE, last, TILE, BLOCK_SIZE)
        key_C = start + tl.arange(0, TILE)
        base_P = block_P.to(tl.int64) * stride_block
        base_C = tl.broadcast_to(base_P[:, None], [PAGES, TILE // PAGES]).reshape(TILE)
        offset_C = base_C + tl.minimum(key_C, last) % BLOCK_SIZE * stride_token
        offset_C = tl.multiple_of(offset_C, VECTOR)
        c_CL = tl.load(
            kv_ptr + (offset_C[:, None] + l_L[None, :]),
            mask=tl.broadcast_to(latent_L[None, :], [TILE, PADDED_LATENT]),
            other=0.0,
        )
        e_CE = tl.load(
            kv_ptr + LATENT + (offset_C[:, None] + e_E[None, :]),
            mask=tl.broadcast_to(rope_E[None, :], [TILE, PADDED_ROPE]),
            other=0.0,
        )
        c_CL = c_CL.to(q_ML.dtype)
        e_CE = e_CE.to(q_ML.dtype)
        if STAGED:
            c_CL = halves(c_CL)
        if SWAP:
            score_CM = tl.dot(e_CE, tl.trans(q_ME), input_precision="ieee")
            score_CM = tl.dot(c_CL, tl.trans(q_ML), score_CM, input_precision="ieee")
            score_CM *= scale_M[None, :]
            score_CM = tl.where(key_C[:, None] < visible_M[None, :], score_CM, float("-inf"))
            new_max_M = tl.maximum(max_M, tl.max(score_CM, 0))
        else:
            score_MC = tl.dot(q_ME, tl.trans(e_CE), input_precision="ieee")
            score_MC = tl.dot(q_ML, tl.trans(c_CL), score_MC, input_precision="ieee")
            score_MC *= scale_M[:, None]
            score_MC = tl.where(key_C[None, :] < visible_M[:, None], score_MC, float("-inf"))
            new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if DRAFTS:  # a row that sees none of these keys: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        rescale_M = tl.exp2(max_M - base_M)
        if SWAP:
            weight_CM = tl.exp2(score_CM - base_M[None, :])
            sum_M = sum_M * rescale_M + tl.sum(weight_CM, 0)
            acc = tl.dot(
                tl.trans(c_CL), weight_CM.to(q_ML.dtype), acc * rescale_M[None, :],
                input_precision="ieee",
            )  # fmt: skip
        else:
            weight_MC = tl.exp2(score_MC - base_M[:, None])
            sum_M = sum_M * rescale_M + tl.sum(weight_MC, 1)
            acc = tl.dot(
                weight_MC.to(q_ML.dtype), c_CL, acc * rescale_M[:, None], input_precision="ieee"
            )
        max_M = new_max_M
    return acc, max_M, sum_M
