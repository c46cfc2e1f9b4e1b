"""`attn_ops::merge_attn_states`: attention over two disjoint sets of keys, made one.

T tokens, N query heads, H head size.
"""

from typing import Any

import torch

from attn_ops.ops.library import LIBRARY, implements
from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import HOW_SCHEMA, known_output_quant

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_STATES = "Tensor out1, Tensor lse1, Tensor out2, Tensor lse2"
LIBRARY.define(f"merge_attn_states({_STATES}) -> (Tensor, Tensor)")
LIBRARY.define(f"merge_attn_states_quant({_STATES}, *, {HOW_SCHEMA}) -> (Tensor, Tensor)")


@implements("merge_attn_states")
def _merge_attn_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    check_states(out1, lse1, out2, lse2)
    merge = reference_merge_attn_states
    if out1.device.type == "cuda" and lse1.dtype == torch.float32:
        from attn_ops.ops.triton.merge import launch_merge_attn_states as merge
    return merge(out1, lse1, out2, lse2)


@torch.library.register_fake("attn_ops::merge_attn_states", lib=LIBRARY)
def _merge_attn_states_fake(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return out1.new_empty(out1.shape), lse1.new_empty(lse1.shape)


@implements("merge_attn_states_quant")
def _merge_attn_states_quant(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    *,
    out_scale: torch.Tensor | None = None,
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_states(out1, lse1, out2, lse2)
    how = known_output_quant(**fields)
    how.check(out1, out_scale)
    out, _ = _merge_attn_states(out1, lse1, out2, lse2)
    return quantize_output(out, how, out_scale)


@torch.library.register_fake("attn_ops::merge_attn_states_quant", lib=LIBRARY)
def _merge_attn_states_quant_fake(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    *,
    out_scale: torch.Tensor | None = None,
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return known_output_quant(**fields).empty(out1)


def check_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> None:
    """Raise a ValueError that names the first argument that does not fit `out1`."""
    if out1.dim() != 3:
        raise ValueError(
            f"out1 must have shape [num_tokens, num_heads, head_size], got {list(out1.shape)}"
        )
    if out1.dtype not in _FLOATS:
        raise ValueError(
            f"out1 must have a floating point type, got {out1.dtype}; "
            f"supported: {', '.join(map(str, _FLOATS))}"
        )
    exact = out1.dtype == lse1.dtype == torch.float64
    lse_dtype = torch.float64 if exact else torch.float32
    for name, x, dtype, shape in (
        ("lse1", lse1, lse_dtype, out1.shape[:2]),
        ("out2", out2, out1.dtype, out1.shape),
        ("lse2", lse2, lse_dtype, out1.shape[:2]),
    ):
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(
                f"{name} must be {dtype} of shape {list(shape)}, got {x.dtype} {list(x.shape)}"
            )
        if x.device != out1.device:
            raise ValueError(f"{name} must be on the device of out1, {out1.device}, got {x.device}")


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
    return torch.ops.attn_ops.merge_attn_states(out1, lse1, out2, lse2)


def merge_attn_states_quant(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
    *,
    scheme: str,
    out_scale: torch.Tensor | None = None,
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states`, its output quantized by a kernel after it, without the log-sum-exp.

    `merge_attn_states` documents the states, `attention_quant` the scheme, `out_scale`, the further
    fields (`min_scale` to `ue8m0`) and what is returned.

    Raises:
        ValueError: as both.
    """
    return torch.ops.attn_ops.merge_attn_states_quant.default(
        out1, lse1, out2, lse2, scheme=scheme, out_scale=out_scale, **fields
    )
