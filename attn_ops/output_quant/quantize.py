"""Quantizes attention's output after attention. A fused kernel must give the same numbers.

T tokens, N query heads, H head size, W = N * H, G groups of a row, E values of a group.
"""

import torch

from attn_ops.output_quant.schemes import (
    FP4_BLOCK,
    FP4_MAX,
    FP8_MAX,
    OutputQuant,
    QuantizedOutput,
)

_LEAST_BLOCK_SCALE = torch.finfo(torch.float8_e4m3fn).tiny


def quantize_output(
    x: torch.Tensor, how: OutputQuant, out_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N, H] quantized: what `attention_quant` returns for attention's output x.

    One Triton kernel on CUDA (two for `fp8_tensor`), else plain PyTorch.

    Raises:
        ValueError: x or `out_scale` does not fit the scheme.
    """
    how.check(x, out_scale)
    if not x.is_cuda or x.dtype == torch.float64 or x.numel() == 0:
        return reference_quantize(x, how, out_scale)
    from attn_ops.output_quant.triton.quantize import launch_quantize

    quant = QuantizedOutput(how, out_scale, *how.empty(x))
    return launch_quantize(x, quant), quant.scales


def reference_quantize(
    x: torch.Tensor, how: OutputQuant, out_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_output` in plain PyTorch, rounding where the libraries round."""
    out, scales = how.empty(x)
    if x.numel() == 0:
        return out, scales.zero_()  # of no row there is no amax
    if how.scheme == "nvfp4":
        return _nvfp4(x, out_scale, out, scales)
    x_TGE = x.reshape(*_grouped_shape(x, how))
    if how.scheme == "fp8_static":
        assert out_scale is not None
        scale_TG1 = out_scale.reshape(1, 1, 1)
    else:
        scale_TG1 = _scales(x_TGE, how)
        scales.copy_(scale_TG1.reshape(scales.shape))
    values = _scaled(x_TGE.float(), scale_TG1, how)
    if how.round_values:
        values = values.to(x.dtype).float()
    fp8 = values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return fp8.reshape(out.shape), scales


def _scaled(x_TGE: torch.Tensor, scale_TG1: torch.Tensor, how: OutputQuant) -> torch.Tensor:
    if not how.multiply:
        return x_TGE / scale_TG1
    return x_TGE * (scale_TG1.reciprocal() if how.dynamic else scale_TG1)


def _grouped_shape(x: torch.Tensor, how: OutputQuant) -> tuple[int, int, int]:
    num_tokens, width = x.shape[0], x.shape[1] * x.shape[2]
    if how.scheme == "fp8_tensor":
        return 1, 1, num_tokens * width
    group = how.group or width
    return num_tokens, width // group, group


def _scales(x_TGE: torch.Tensor, how: OutputQuant) -> torch.Tensor:
    """[T, G, 1] float32."""
    dtype = x_TGE.dtype if how.round_scale else torch.float32
    scale = (x_TGE.abs().amax(dim=2, keepdim=True).to(dtype) / FP8_MAX).float()
    scale = scale.clamp(min=how.min_scale)
    return _power_of_two(scale) if how.ue8m0 else scale


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not smaller, by the bits of float32; 0 and NaN stay."""
    bits = scale.view(torch.int32)
    power = ((bits + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)


def _nvfp4(
    x: torch.Tensor, out_scale: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of two levels, as torchao's `nvfp4_quantize`: E4M3 a block, and one for all."""
    num_tokens, width = x.shape[0], x.shape[1] * x.shape[2]
    x_TGE = x.reshape(num_tokens, width // FP4_BLOCK, FP4_BLOCK).float()
    scale_TG = x_TGE.abs().amax(dim=2) / FP4_MAX
    if out_scale is not None:
        scale_TG = scale_TG / out_scale.reshape(1, 1)
    fp8_TG = scale_TG.clamp(_LEAST_BLOCK_SCALE, FP8_MAX).to(torch.float8_e4m3fn)
    inverse = 1.0 if out_scale is None else 1.0 / out_scale.reshape(1, 1)
    values = (x_TGE * (inverse / fp8_TG.float()).unsqueeze(2)).clamp(-FP4_MAX, FP4_MAX)
    codes = e2m1_codes(values).reshape(num_tokens, width // 2, 2)
    out.copy_((codes[..., 0] | codes[..., 1] << 4).reshape(out.shape))
    padded = torch.zeros(scales.shape, dtype=torch.float8_e4m3fn, device=x.device)
    padded[:num_tokens, : fp8_TG.shape[1]] = fp8_TG
    return out, swizzled(padded)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Four bits of each float32, nearest even: sign, two of exponent, one of mantissa; uint8.

    NaN becomes the largest number.
    """
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    # Between two neighbours the even code has the middle.
    for middle, taken in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False),
                          (3.5, True), (5.0, False)):  # fmt: skip
        code += (size >= middle if taken else size > middle).to(torch.uint8)
    code = code | (values.signbit().to(torch.uint8) << 3)
    return torch.where(size.isnan(), 7, code).to(torch.uint8)


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """[128 a, 4 b] in cuBLAS's order of block scales: tiles of 128 rows and 4 columns."""
    rows, columns = scales.shape
    tiles = scales.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)
