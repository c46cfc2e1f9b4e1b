"""What both attention kernels share: streaming softmax over key tiles, options as arguments.

T tokens, N query heads, H head size padded to a power of two, B block size, C keys of a tile,
M rows of a program.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.backends.base import AttentionOptions
from attn_ops.metadata import KV_CACHE_DTYPES

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def attend_tiles(
    acc_MH,
    max_M,
    sum_M,
    q_MH,  # its dtype is that of the products
    position_M,  # of each row in its sequence
    slope_M,  # of ALiBi, base 2, if HAS_ALIBI
    k_ptr,  # of this kv head, at physical block 0
    v_ptr,
    table_ptr,  # the request's row of the block table
    seq_len,
    begin,  # keys begin..end are visited; begin is a multiple of TILE
    end,
    stride_block,
    stride_token,
    score_scale,
    soft_cap,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,  # keys behind a row's position are masked
    HAS_WINDOW: tl.constexpr,
    HAS_RIGHT_WINDOW: tl.constexpr,  # the window is symmetric
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    MASKED: tl.constexpr,  # False: the caller knows that every row sees every key of begin..end
):
    """Streaming softmax over key tiles, base 2, float32: acc_MH (not normalized), max_M, sum_M."""
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    if HEAD_SIZE == PADDED_HEAD_SIZE:  # a constant mask: the load is then unpredicated
        stored_H = tl.full([PADDED_HEAD_SIZE], 1, tl.int1)
    else:
        stored_H = h_H < HEAD_SIZE
    for start in range(begin, end, TILE):
        key_C = start + tl.arange(0, TILE)
        # Slots past seq_len may hold NaN, which a zero weight would not
        # silence: they are never loaded.
        if MASKED:
            valid_C = key_C < seq_len
        else:
            valid_C = tl.full([TILE], 1, tl.int1)
        block_C = tl.load(table_ptr + key_C // BLOCK_SIZE, mask=valid_C, other=0)
        offset_C = block_C.to(tl.int64) * stride_block + (key_C % BLOCK_SIZE) * stride_token
        k_HC = tl.load(
            k_ptr + offset_C[None, :] + h_H[:, None],
            mask=valid_C[None, :] & stored_H[:, None],
            other=0.0,
        )
        score_MC = tl.dot(q_MH, k_HC.to(q_MH.dtype), input_precision="ieee") * score_scale
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
        new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MC = tl.exp2(score_MC - base_M[:, None])
        rescale_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_MC, 1)
        v_CH = tl.load(
            v_ptr + offset_C[:, None] + h_H[None, :],
            mask=valid_C[:, None] & stored_H[None, :],
            other=0.0,
        )
        acc_MH = tl.dot(
            weight_MC.to(q_MH.dtype),
            v_CH.to(q_MH.dtype),
            acc_MH * rescale_M[:, None],
            input_precision="ieee",
        )
        max_M = new_max_M
    return acc_MH, max_M, sum_M


@triton.jit
def first_logits(sinks_ptr, head_M, counted_M, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """max_M and sum_M of `attend_tiles` before the first key: nothing, or the sinks of counted_M.

    A row of a request without keys must not be counted: its sink would pass for a key.
    """
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        max_M = tl.load(sinks_ptr + head_M, mask=counted_M, other=float("-inf")) * LOG2_E
        sum_M = tl.where(counted_M, 1.0, 0.0)
    return max_M, sum_M


class Tiles(NamedTuple):
    """Constants of a launch."""

    rows: int  # most rows of a program
    keys: int  # keys of a tile
    num_warps: int
    num_stages: int


def score_constants(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(score_scale, soft_cap) as `attend_tiles` reads them.

    Exponentials are base 2, and tanh(x) is 1 - 2 / (exp2(2 x log2 e) + 1).
    """
    log2_e = LOG2_E.value
    if soft_cap is None:
        return scale * log2_e, 0.0
    return 2.0 * log2_e * scale / soft_cap, soft_cap * log2_e


def option_arguments(
    options: AttentionOptions, unused: torch.Tensor
) -> tuple[tuple[float | int | torch.Tensor, ...], dict[str, Any]]:
    """The kernels' arguments from `score_scale` to `lse_ptr`, and the flags: which are read.

    `unused` stands for tensors that the layer does not have.
    """
    fp8 = KV_CACHE_DTYPES[options.kv_cache_dtype] is not None
    tensors = {
        "HAS_ALIBI": options.alibi_slopes,
        "HAS_SINKS": options.sinks,
        "HAS_K_SCALE": options.k_scale if fp8 else None,
        "HAS_V_SCALE": options.v_scale if fp8 else None,
        "HAS_LSE": options.lse,
    }
    flags: dict[str, Any] = {name: tensor is not None for name, tensor in tensors.items()}
    flags["HAS_WINDOW"] = options.sliding_window is not None
    flags["HAS_SOFT_CAP"] = options.soft_cap is not None
    pointers = (unused if tensor is None else tensor for tensor in tensors.values())
    constants = score_constants(options.scale, options.soft_cap)
    return (*constants, options.sliding_window or 0, *pointers), flags


def readable(kv_cache: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """The cache as a kernel loads it: uint8 storage becomes a view of FP8."""
    fp8 = KV_CACHE_DTYPES[options.kv_cache_dtype]
    return kv_cache if fp8 is None else kv_cache.view(fp8)


def widened(dtype: torch.dtype) -> bool:
    """Whether products must be float32: the interpreter multiplies bfloat16 as stored integers."""
    return dtype == torch.bfloat16 and knobs.runtime.interpret
