"""Quantized output of latent attention, part by part of a batch.

T tokens, N query heads, V head size of values.
"""

import torch

from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import OutputQuant, QuantizedOutput


def by_rows(how: OutputQuant) -> bool:
    """Whether neighbouring rows can be quantized apart from the others."""
    return how.scheme not in ("fp8_tensor", "nvfp4") and not how.column_major


def of_rows(quant: QuantizedOutput, rows: slice) -> QuantizedOutput:
    """The results of some rows, as views."""
    scales = quant.scales if quant.how.scheme == "fp8_static" else quant.scales[rows]
    return QuantizedOutput(quant.how, quant.out_scale, quant.out[rows], scales)


def quantize_into(out: torch.Tensor, quant: QuantizedOutput) -> torch.Tensor:
    """out [T, N, V], quantized by a kernel of its own; `quant.out` is returned."""
    if out.numel() == 0:
        return quant.out
    if out.is_cuda and out.dtype != torch.float64:
        from attn_ops.output_quant.triton.quantize import launch_quantize

        return launch_quantize(out, quant)
    values, scales = reference_quantize(out, quant.how, quant.out_scale)
    quant.out.copy_(values)
    quant.scales.copy_(scales)
    return quant.out


def merge_into(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    quant: QuantizedOutput,
) -> torch.Tensor:
    """`merge_attn_states`, its output quantized: by one kernel on CUDA, where the scheme allows it.

    Returns:
        The log-sum-exp [T, N].
    """
    fused = out1.is_cuda and out1.dtype != torch.float64
    if fused and quant.how.within_heads(out1.shape[2]):
        from attn_ops.ops.triton.merge import launch_merge_attn_states

        return launch_merge_attn_states(out1, lse1, out2, lse2, quant)[1]
    out, lse = torch.ops.attn_ops.merge_attn_states(out1, lse1, out2, lse2)
    quantize_into(out, quant)
    return lse
