"""Quantizes and stores the rows of a kernel: TRITON's for single tokens, and the quantize kernels.

A kernel takes `quant`, a pair of tensors or None, and the constant `HOW`, or None;
`epilogue_arguments` makes both. NaN and rows of zeros become what `reference_quantize` makes of
them: maxima are taken of float32's bits, of which NaN has the largest.

M rows of a program, each one head of a token; H head size padded to a power of two, G groups of a
head, E values of a group.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.output_quant.schemes import FP4_MAX, FP8_MAX, OutputQuant, QuantizedOutput

STATIC = tl.constexpr(0)
GROUPS = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
ROW = tl.constexpr(3)
TENSOR = tl.constexpr(4)

_LARGEST8 = tl.constexpr(FP8_MAX)
_LARGEST4 = tl.constexpr(FP4_MAX)
_LEAST_BLOCK_SCALE = tl.constexpr(torch.finfo(torch.float8_e4m3fn).tiny)


class How(NamedTuple):
    """`OutputQuant` as a kernel's constant. Kernels read it by place, and name in their own lines
    what they read: every launch compares the global constants that its kernel names.
    """

    scheme: int
    group: int  # E; 0: none
    dtype: int  # of attention's output: 0 float32, 1 float16, 2 bfloat16
    round_scale: bool
    round_values: bool
    multiply: bool
    ue8m0: bool
    min_scale: float
    has_scale: bool  # `out_scale` is given
    interpreted: bool  # conversions of the interpreter do not round to nearest even


_SCHEMES = {"fp8_static": STATIC, "nvfp4": NVFP4, "fp8_row": ROW, "fp8_tensor": TENSOR}
"""Schemes without groups of FP8."""

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def constants(how: OutputQuant, dtype: torch.dtype, has_scale: bool) -> How:
    """What a kernel is compiled for, of an output that would have `dtype`."""
    scheme = _SCHEMES.get(how.scheme, GROUPS).value
    return How(
        scheme, how.group or 0, _DTYPES[dtype], how.round_scale, how.round_values,
        how.multiply, how.ue8m0, how.min_scale, has_scale, knobs.runtime.interpret,
    )  # fmt: skip


def epilogue_arguments(quant: QuantizedOutput | None, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels' arguments `quant` and `HOW`; None, if the output keeps q's `dtype`."""
    if quant is None:
        return {"quant": None, "HOW": None}
    scale = quant.scales if quant.out_scale is None else quant.out_scale
    how = constants(quant.how, dtype, quant.out_scale is not None)
    return {"quant": (quant.scales, scale), "HOW": tuple(how)}


@triton.jit
def rounded(x, HOW: tl.constexpr):
    """float32 as the dtype of attention's output holds it."""
    DTYPE: tl.constexpr = HOW[2]
    INTERPRETED: tl.constexpr = HOW[9]
    if DTYPE == 1:
        x = x.to(tl.float16).to(tl.float32)
    elif DTYPE == 2:
        if INTERPRETED:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        else:
            x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def to_e4m3(y, HOW: tl.constexpr):
    """float32 to the nearest number of E4M3, at most +-448; NaN stays. GPUs limit it themselves."""
    INTERPRETED: tl.constexpr = HOW[9]
    if INTERPRETED:
        y = limited(y, _LARGEST8)
        bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(y) + 24576.0) - 24576.0  # 1.5 * 2 ** 23 steps of 2 ** -9
        code = tl.where(tl.abs(y) < 0.015625, (small * 512.0).to(tl.int32), normal)
        code = tl.where(y == y, code, 0x7F) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return y.to(tl.float8e4nv)


@triton.jit
def limited(x, LARGEST: tl.constexpr):
    """x within +-LARGEST; NaN stays."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@triton.jit
def magnitude(x):
    """|x| as int32, in float32's order; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def over_constant(x, CONSTANT: tl.constexpr, HOW: tl.constexpr):
    """x / CONSTANT as PyTorch divides by a Python number: on CUDA by its inverse."""
    INTERPRETED: tl.constexpr = HOW[9]
    if INTERPRETED:
        y = tl.div_rn(x, tl.full(x.shape, CONSTANT, tl.float32))
    else:
        y = x * (1.0 / CONSTANT)
    return y


@triton.jit
def divided(x, scale, inverse, HOW: tl.constexpr):
    """x / scale, rounded once; `inverse` is 1 / scale, rounded, and costs once what x costs often.

    The quotient by the inverse is corrected by its remainder (Markstein 1990), which three
    instructions do, where a division takes ten. Infinite and NaN stay as they are.
    """
    INTERPRETED: tl.constexpr = HOW[9]
    if INTERPRETED:
        y = tl.div_rn(x, scale)
    else:
        near = x * inverse
        y = tl.fma(tl.fma(-near, scale, x), inverse, near)
        y = tl.where(tl.abs(near) < float("inf"), y, near)
    return y


@triton.jit
def inverse_of(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def scale_of(largest, HOW: tl.constexpr):
    """The scale of values whose largest `magnitude` is given."""
    ROUND_SCALE: tl.constexpr = HOW[3]
    UE8M0: tl.constexpr = HOW[6]
    MIN_SCALE: tl.constexpr = HOW[7]
    scale = over_constant(largest.to(tl.float32, bitcast=True), _LARGEST8, HOW)
    if ROUND_SCALE:
        scale = rounded(scale, HOW)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        power = ((bits + 0x7FFFFF) >> 23 << 23).to(tl.float32, bitcast=True)
        scale = tl.where(scale == scale, power, scale)
    return scale


@triton.jit
def as_fp8(x, scale, inverse, HOW: tl.constexpr):
    """x / scale in E4M3; x float32, already rounded to the output's dtype; scale of x's rank."""
    ROUND_VALUES: tl.constexpr = HOW[4]
    MULTIPLY: tl.constexpr = HOW[5]
    STATIC_SCALE: tl.constexpr = HOW[0] == STATIC
    scale, inverse = tl.broadcast_to(scale, x.shape), tl.broadcast_to(inverse, x.shape)
    if MULTIPLY:
        y = x * (scale if STATIC_SCALE else inverse)
    else:
        y = divided(x, scale, inverse, HOW)
    if ROUND_VALUES:
        y = rounded(y, HOW)
    return to_e4m3(y, HOW)


@triton.jit
def as_e2m1(y):
    """Four bits a value, nearest even, int32; y within +-6. NaN becomes the largest number."""
    size = tl.abs(y)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code = code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
    return tl.where(y == y, code, 7)


@triton.jit
def block_scales(largest_MG, given, HOW: tl.constexpr):
    """E4M3 scales of NVFP4's blocks, and the factors that values are multiplied by."""
    HAS_SCALE: tl.constexpr = HOW[8]
    scale_MG = largest_MG.to(tl.float32, bitcast=True)
    scale_MG = over_constant(scale_MG, _LARGEST4, HOW)
    inverse_MG = tl.full(scale_MG.shape, 1.0, tl.float32)
    if HAS_SCALE:
        given_MG = given + tl.zeros(scale_MG.shape, tl.float32)
        scale_MG = tl.div_rn(scale_MG, given_MG)
        inverse_MG = inverse_of(given_MG)
    scale_MG = tl.where(scale_MG < _LEAST_BLOCK_SCALE, _LEAST_BLOCK_SCALE, scale_MG)
    fp8_MG = to_e4m3(scale_MG, HOW)
    held_MG = tl.where(scale_MG == scale_MG, fp8_MG.to(tl.float32), scale_MG)
    return fp8_MG, tl.div_rn(inverse_MG, held_MG)


@triton.jit
def swizzled_offset(row, column, NUM_COLUMNS: tl.constexpr):
    """Where cuBLAS has the block scale of a row and column: tiles of 128 rows and 4 columns."""
    TILES: tl.constexpr = (NUM_COLUMNS + 3) // 4
    tile = row // 128 * TILES + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@triton.jit
def given_scale(quant, HOW: tl.constexpr):
    """`out_scale`, to be loaded before there is anything to quantize; 1 if there is none.

    Kernels that start early load it before they wait: no kernel of a step writes it.
    """
    given = 1.0
    if HOW is not None:
        HAS_SCALE: tl.constexpr = HOW[8]
        if HAS_SCALE:
            given = tl.load(quant[1])
    return given


@triton.jit
def store_quantized(
    out_ptr,  # [T, NUM_HEADS, HEAD_SIZE] float8e4nv contiguous, NVFP4: half as wide, uint8
    x_MH,  # float32
    row_M,  # token, int64
    head_M,
    owned_M,
    given,  # of `given_scale`
    quant,  # scales_ptr, scale_ptr
    HOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Rows of heads, quantized by a given scale or by groups within a head."""
    SCHEME: tl.constexpr = HOW[0]
    GROUP: tl.constexpr = HOW[1]
    x_MH = rounded(x_MH, HOW)
    h_H = tl.arange(0, PADDED_HEAD_SIZE)
    mask_MH = owned_M[:, None] & (h_H < HEAD_SIZE)[None, :]
    place_M = row_M * NUM_HEADS + head_M
    if SCHEME == STATIC:
        scale_11 = given + tl.zeros([1, 1], tl.float32)
        out_ptr_MH = out_ptr + (place_M * HEAD_SIZE)[:, None] + h_H[None, :]
        tl.store(out_ptr_MH, as_fp8(x_MH, scale_11, inverse_of(scale_11), HOW), mask=mask_MH)
    else:
        NUM_GROUPS: tl.constexpr = PADDED_HEAD_SIZE // GROUP
        COLUMNS: tl.constexpr = NUM_HEADS * HEAD_SIZE // GROUP
        if NUM_GROUPS == 1:  # no other layout of the values is needed
            largest_MG = tl.max(magnitude(x_MH), 1)[:, None]
            x_MGE = x_MH
        else:
            x_MGE = tl.reshape(x_MH, [BLOCK_M, NUM_GROUPS, GROUP])
            largest_MG = tl.max(magnitude(x_MGE), 2)
        g_G = tl.arange(0, NUM_GROUPS)
        column_MG = (head_M * (HEAD_SIZE // GROUP))[:, None] + g_G[None, :]
        stored_MG = owned_M[:, None] & (g_G < HEAD_SIZE // GROUP)[None, :]
        if SCHEME == NVFP4:
            fp8_MG, factor_MG = block_scales(largest_MG, given, HOW)
            offset_MG = swizzled_offset(row_M[:, None], column_MG, COLUMNS)
            tl.store(quant[0] + offset_MG, fp8_MG, mask=stored_MG)
            if NUM_GROUPS > 1:
                factor_MG = factor_MG[:, :, None]
            y_MGE = limited(x_MGE * factor_MG, _LARGEST4)
            HALF: tl.constexpr = PADDED_HEAD_SIZE // 2
            low, high = tl.split(tl.reshape(as_e2m1(y_MGE), [BLOCK_M, HALF, 2]))
            b_B = tl.arange(0, HALF)
            out_ptr_MB = out_ptr + (place_M * (HEAD_SIZE // 2))[:, None] + b_B[None, :]
            mask_MB = owned_M[:, None] & (b_B < HEAD_SIZE // 2)[None, :]
            tl.store(out_ptr_MB, (low | (high << 4)).to(tl.uint8), mask=mask_MB)
        else:
            scale_MG = scale_of(largest_MG, HOW)
            offset_MG = row_M[:, None] * COLUMNS + column_MG
            tl.store(quant[0] + offset_MG, scale_MG, mask=stored_MG)
            inverse_MG = inverse_of(scale_MG)
            if NUM_GROUPS > 1:
                scale_MG, inverse_MG = scale_MG[:, :, None], inverse_MG[:, :, None]
            y_MGE = as_fp8(x_MGE, scale_MG, inverse_MG, HOW)
            y_MH = tl.reshape(y_MGE, [BLOCK_M, PADDED_HEAD_SIZE])
            out_ptr_MH = out_ptr + (place_M * HEAD_SIZE)[:, None] + h_H[None, :]
            tl.store(out_ptr_MH, y_MH, mask=mask_MH)
