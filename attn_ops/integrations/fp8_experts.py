"""Transformers' experts in FP8 by `attn_ops::experts`: its own need kernels from a hub."""

from typing import Any

import torch

from attn_ops.ops.moe.composite import BLOCK
from attn_ops.ops.moe.experts import FP8, experts

ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
"""By classes of Transformers and torch."""


def fp8_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What Transformers' `FP8Experts` computes, without rounding its inputs to FP8.

    Args:
        module: an `FP8Experts`. Static scales of its inputs round these alone, and are not used.
        hidden_states: [T, K].
        top_k_index: [T, top_k]; a number that is no expert adds nothing.
        top_k_weights: [T, top_k].

    Returns:
        [T, K] in the dtype of hidden_states.

    Raises:
        ValueError: the experts are not in FP8, or their gate is not known.
    """
    of: Any = module
    gate = _gate_of(of)
    if of.block_size not in (None, (BLOCK, BLOCK), [BLOCK, BLOCK]):
        raise ValueError(f"block_size must be ({BLOCK}, {BLOCK}) or None, got {of.block_size}")
    for name, w in {"gate_up_proj": of.gate_up_proj, "down_proj": of.down_proj}.items():
        if w.dtype != FP8:
            raise ValueError(f"{name} must be {FP8}, got {w.dtype}")
    return experts(
        hidden_states, of.gate_up_proj, of.down_proj, top_k_index, top_k_weights,
        gate_up_scale=_scale_of(of, "gate_up_proj", 2), down_scale=_scale_of(of, "down_proj", 1),
        **gate,
    )  # fmt: skip


def _scale_of(module: Any, name: str, num_parts: int) -> torch.Tensor:
    """A weight's scales for `experts`: one a row where their shape leaves open what they are of.

    A checkpoint has scales of gate and up apart, and Transformers puts them behind each other. A
    block of 128 rows ends with the gate then, if there are as many scales as both have.
    """
    scale, (_, m, k) = getattr(module, f"{name}_scale_inv"), getattr(module, name).shape
    if not scale.is_floating_point():
        raise ValueError(
            f"{name}_scale_inv must be floating-point, got {scale.dtype}; "
            "supported: float32, float8_e8m0fnu"
        )
    scale, rows = scale.float(), scale.shape[1]
    group = m // rows if module.block_size is None else BLOCK
    apart = num_parts * -(-m // (num_parts * group)) == rows
    parts = num_parts if apart else 1
    if rows == 1 or (k > BLOCK and (parts == 1 or m % (parts * group) == 0)):
        return scale
    by_part = scale.unflatten(1, (parts, -1)).repeat_interleave(group, 2)
    return by_part[:, :, : m // parts].flatten(1, 2)


def _gate_of(module: Any) -> dict[str, Any]:
    """The activation and the limits of an `FP8Experts`, as `experts` has them."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    if "_apply_gate" in vars(module) or type(module)._apply_gate is not FP8Experts._apply_gate:
        raise ValueError(f"_apply_gate of {type(module).__name__} must be that of FP8Experts")
    if not module.has_gate or module.has_bias or getattr(module, "gate_softcap", None) is not None:
        raise ValueError(
            "experts must have a gate, no biases and no soft cap, got "
            f"{type(module).__name__} with has_gate={module.has_gate}, has_bias={module.has_bias}, "
            f"gate_softcap={getattr(module, 'gate_softcap', None)}"
        )
    if getattr(module, "swiglu_alpha", None) is not None:
        more = {"alpha": float(module.swiglu_alpha), "limit": module.swiglu_limit}
        return {"activation": "gpt_oss", **more}
    name = type(module.act_fn).__name__
    if name not in ACTIVATIONS:
        raise ValueError(
            f"act_fn of experts must be known, got {name}; supported: {', '.join(ACTIVATIONS)}"
        )
    return {"activation": ACTIVATIONS[name], "limit": getattr(module, "limit", None)}
