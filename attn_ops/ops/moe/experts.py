"""`attn_ops::experts`: a mixture of experts, from routed rows to the weighted sum of their experts.

T rows of x, top_k experts of each, S = T * top_k pairs, E experts, K inputs and outputs, F columns
of a gate.
"""

import math
from typing import Any

import torch

from attn_ops.ops.library import operator
from attn_ops.ops.moe.composite import experts_by_torch, scale_group
from attn_ops.ops.products.skinny_constants import is_measured

FP8 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu_tanh", "gpt_oss")


def _check(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    residual: torch.Tensor | None = None,
    ordered: bool = False,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    _check_weights(x, w_gate_up, w_down, gate_up_scale)
    _check_scale("gate_up_scale", w_gate_up, gate_up_scale)
    _check_scale("down_scale", w_down, down_scale)
    (num_experts, both, k), num_rows = w_gate_up.shape, x.shape[0]
    if expert_ids.dim() != 2 or expert_ids.shape[0] != num_rows or expert_ids.shape[1] == 0:
        raise ValueError(
            f"expert_ids must have shape [{num_rows}, top_k], got {list(expert_ids.shape)}"
        )
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expert_ids must be integers, got {expert_ids.dtype}; supported: int32, int64"
        )
    if weights.shape != expert_ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating-point of expert_ids' shape {list(expert_ids.shape)}, "
            f"got {weights.dtype} {list(weights.shape)}"
        )
    for name, bias, columns in (("gate_up_bias", gate_up_bias, both), ("down_bias", down_bias, k)):
        if bias is not None and list(bias.shape) != [num_experts, columns]:
            raise ValueError(
                f"{name} must have shape [{num_experts}, {columns}], got {list(bias.shape)}"
            )
    given = {"w_gate_up": w_gate_up, "w_down": w_down, "expert_ids": expert_ids}
    given |= {"weights": weights, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    given |= {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    for name, other in given.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {other.device}")
    like_x = residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype)
    if residual is not None and not (like_x and residual.device == x.device):
        raise ValueError(
            f"residual must be {x.dtype} of x's shape {list(x.shape)} on {x.device}, got "
            f"{residual.dtype} {list(residual.shape)} on {residual.device}"
        )
    _check_gate(activation, alpha, limit)


def _check_weights(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, scale: torch.Tensor | None
) -> None:
    if x.dim() != 2 or not x.is_floating_point() or x.dtype == FP8:
        raise ValueError(f"x must be floating-point of shape [T, K], got {x.dtype} {list(x.shape)}")
    dtype = x.dtype if scale is None else FP8
    fits = w_gate_up.dim() == 3 and w_gate_up.shape[2] == x.shape[1] and not w_gate_up.shape[1] % 2
    if not fits or w_gate_up.dtype != dtype:
        raise ValueError(
            f"w_gate_up must be {dtype} of shape [E, 2 * F, {x.shape[1]}], "
            f"got {w_gate_up.dtype} {list(w_gate_up.shape)}"
        )
    wanted = [w_gate_up.shape[0], x.shape[1], w_gate_up.shape[1] // 2]
    if list(w_down.shape) != wanted or w_down.dtype != dtype:
        raise ValueError(
            f"w_down must be {dtype} of shape [E, K, F] = {wanted}, "
            f"got {w_down.dtype} {list(w_down.shape)}"
        )


def _check_scale(name: str, w: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Of a weight [E, M, K]: float32 [E, R, C] if and only if it is FP8."""
    if scale is None and w.dtype != FP8:
        return
    fits = scale is not None and scale.dtype == torch.float32 and scale.dim() == 3
    if scale is None or not fits or scale.shape[0] != w.shape[0] or w.dtype != FP8:
        got = None if scale is None else f"{scale.dtype} {list(scale.shape)}"
        raise ValueError(
            f"{name} must be torch.float32 of shape [{w.shape[0]}, R, C] for weights in {FP8}, and "
            f"None for others, got {got} for {w.dtype}"
        )
    try:
        scale_group(w, scale)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_gate(activation: str, alpha: float, limit: float | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be known, got {activation!r}; supported: {', '.join(ACTIVATIONS)}"
        )
    if not -math.inf < alpha < math.inf or (activation == "gelu_tanh" and alpha != 1):
        raise ValueError(f"alpha must be finite, and 1 for gelu_tanh, got {alpha}")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"limit must be None or over 0, got {limit}")


@operator(fake=lambda x, *other, **more: x.new_empty(x.shape), check=_check)
def experts(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    residual: torch.Tensor | None = None,
    ordered: bool = False,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over a row's experts of weight * (gate(x @ gate_up[expert].T) @ down[expert].T).

    On Hopper GPUs a few kernels read the weights of chosen experts alone. A row's result then
    depends neither on the other rows nor on how many there are. Elsewhere PyTorch computes it.

    Args:
        x: [T, K].
        w_gate_up: [E, 2 * F, K] in x's dtype, of any strides: the gate's rows before those of up.
            Or float8_e4m3fn with scales; x is not rounded to FP8.
        w_down: [E, K, F] in the dtype of w_gate_up, of any strides.
        expert_ids: [T, top_k] int32 or int64. A number that is no expert adds nothing.
        weights: [T, top_k], of the sum.
        gate_up_bias: [E, 2 * F], in the order of w_gate_up's rows.
        down_bias: [E, K].
        activation: "silu": gate * sigmoid(alpha * gate) * up; "gpt_oss": with up + 1 in place of
            up; "gelu_tanh": GELU of the gate by tanh, times up.
        alpha: of the sigmoid.
        limit: of the gate from above, and of up from both sides, before the activation.
        interleaved: rows of gate and up take turns in w_gate_up and its bias.
        residual: [T, K] in x's dtype, added to the rounded sum.
        ordered: refuse where a row's bits may depend on the other rows, as without our kernels.
        gate_up_scale: [E, R, C] float32, times FP8 weights. R: one a row of the weight, or one a
            block of 128 rows, the last one smaller; C: 1, or one a block of 128 inputs. Where C is
            1, R may be any that divides 2 * F, as 1 or 2. A shape of two meanings is refused.
        down_scale: the same of w_down.

    Returns:
        [T, K] contiguous, in x's dtype. The sum is in float32, in the order of a row's experts;
        each product is rounded to x's dtype first.

    Raises:
        ValueError: shapes, dtypes or the gate do not fit; `ordered` cannot be had.
    """
    by_kernels = (
        x.stride(1) == 1 and x.dtype in HALVES and takes_experts(w_gate_up, w_down, x.device)
    )
    if ordered and not by_kernels:
        raise ValueError(
            "w_gate_up and w_down must be bfloat16, float16 or FP8 of multiples of 16 inputs on a "
            f"Hopper GPU for ordered=True, got {w_gate_up.dtype} {list(w_gate_up.shape)} and "
            f"{list(w_down.shape)} on {x.device}"
        )
    if x.shape[0] == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given = (x, w_gate_up, w_down, expert_ids, weights, gate_up_bias, down_bias)
    named: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit,
                             "interleaved": interleaved, "gate_up_scale": gate_up_scale,
                             "down_scale": down_scale}  # fmt: skip
    if by_kernels:
        from attn_ops.ops.triton.experts import launch_experts

        return launch_experts(*given, **named, residual=residual)
    total = experts_by_torch(*given, **named)
    return total if residual is None else total.add_(residual)


def takes_experts(w_gate_up: torch.Tensor, w_down: torch.Tensor, device: torch.device) -> bool:
    """Whether our kernels multiply by w_gate_up [E, 2 * F, K] and w_down [E, K, F] here."""
    return is_measured(device) and all(_is_read_fast(w) for w in (w_gate_up, w_down))


def _is_read_fast(w: torch.Tensor) -> bool:
    """Whether a weight [E, M, K] is read in whole lines, along its inputs or along its outputs."""
    whole = w.stride(2) == 1 and w.stride(1) % 16 == 0
    turned = w.stride(1) == 1 and w.stride(2) % 16 == 0
    aligned = w.shape[2] % 16 == 0 and w.stride(0) % 16 == 0
    return w.dtype in (*HALVES, FP8) and aligned and (whole or turned)
