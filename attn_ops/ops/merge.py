"""`attn_ops::merge_attn_states`: attention over two disjoint sets of keys, made one.

T tokens, N query heads, H head size.
"""

from typing import Any

import torch

from attn_ops.ops.library import operator
from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import HOW_SCHEMA, how_of, known_output_quant


@operator(fake=lambda out1, lse1, *other: (out1.new_empty(out1.shape), lse1.new_empty(lse1.shape)))
def merge_attn_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    With s = exp(lse1) + exp(lse2): out = (exp(lse1) * out1 + exp(lse2) * out2) / s and
    lse = log(s), the larger lse subtracted before exp (FlashInfer, arXiv:2501.01005, attention
    states and their composition; there in base 2). Associative and commutative, so that any number
    of parts can be merged one by one. One Triton kernel on CUDA.

    A part with lse -inf saw no key: its out is ignored, NaN or not. If neither part saw one, out
    is 0 and lse -inf. A sink must be counted in one part only. An lse of +inf, with which some
    FlashAttention versions mark rows that saw nothing, gives NaN: make it -inf first.

    Args:
        out1, out2: [T, N, H] float64, float32, float16 or bfloat16, both alike.
        lse1, lse2: [T, N] float32, natural logarithm, as `attention_with_lse` returns it; with
            float64 outputs also both float64.

    Returns:
        [T, N, H] in the dtype of out1, accumulated in float32 (float64 for float64), and [T, N] in
        the dtype of lse1; contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_states(out1, lse1, out2, lse2)
    return merged(out1, lse1, out2, lse2)


def _merge_attn_states_quant_fake(
    out1: torch.Tensor, *states: torch.Tensor, out_scale: object = None, **fields: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return known_output_quant(**fields).empty(out1)


@operator(fake=_merge_attn_states_quant_fake, keywords=HOW_SCHEMA)
def merge_attn_states_quant(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor, **fields: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states`, its output quantized by a kernel after it, without the log-sum-exp.

    `merge_attn_states` documents the states, `attention_quant` the scheme, `out_scale`, the further
    fields (`min_scale` to `ue8m0`) and what is returned.

    Raises:
        ValueError: as both.
    """
    check_states(out1, lse1, out2, lse2)
    how, out_scale = how_of(fields)
    how.check(out1, out_scale)
    return quantize_output(merged(out1, lse1, out2, lse2)[0], how, out_scale)


def check_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> None:
    """Raise a ValueError that names the first argument that does not fit `out1`."""
    if out1.dim() != 3:
        raise ValueError(
            f"out1 must have shape [num_tokens, num_heads, head_size], got {list(out1.shape)}"
        )
    if not out1.is_floating_point():
        raise ValueError(f"out1 must have a floating point type, got {out1.dtype}")
    exact = out1.dtype == lse1.dtype == torch.float64
    lse_dtype = torch.float64 if exact else torch.float32
    for name, x, dtype, shape in (
        ("lse1", lse1, lse_dtype, out1.shape[:2]),
        ("out2", out2, out1.dtype, out1.shape),
        ("lse2", lse2, lse_dtype, out1.shape[:2]),
    ):
        if x.dtype != dtype or x.shape != shape or x.device != out1.device:
            raise ValueError(
                f"{name} must be {dtype} of shape {list(shape)} on {out1.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )


def merged(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` of checked arguments, for other operators."""
    if out1.device.type == "cuda" and lse1.dtype == torch.float32:
        from attn_ops.ops.triton.merge import launch_merge_attn_states

        return launch_merge_attn_states(out1, lse1, out2, lse2)
    return reference_merge_attn_states(out1, lse1, out2, lse2)


def reference_merge_attn_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` in plain PyTorch."""
    top_TN = torch.maximum(lse1, lse2)
    top_TN = top_TN.masked_fill(top_TN == float("-inf"), 0)  # -inf - -inf would be NaN
    weight1_TN, weight2_TN = (lse1 - top_TN).exp(), (lse2 - top_TN).exp()
    total_TN = weight1_TN + weight2_TN
    divisor_TN = total_TN.masked_fill(total_TN == 0, 1)
    out_TNH = torch.zeros_like(out1, dtype=torch.promote_types(out1.dtype, torch.float32))
    for out, lse, weight_TN in ((out1, lse1, weight1_TN), (out2, lse2, weight2_TN)):
        seen_TNH = out.to(out_TNH.dtype).masked_fill((lse == float("-inf")).unsqueeze(-1), 0)
        out_TNH += seen_TNH * (weight_TN / divisor_TN).unsqueeze(-1)
    lse_TN = top_TN + total_TN.log()
    return out_TNH.to(out1.dtype).contiguous(), lse_TN.contiguous()
