"""The weight of `kv_b_proj` in a model's dtype, also where it is quantized or adapted.

Computed anew in every call, so that it follows weights written in place. A quantized weight has no
second copy: only the layer that attends has its weight in full precision.

M outputs, Lkv latent.
"""

from typing import Any, cast

import torch
from torch import nn

_PLAIN = (nn.Parameter, torch.Tensor)
"""Types of weights that are no tensor subclass."""


def expansion(linear: Any, like: torch.Tensor) -> torch.Tensor:
    """[M, Lkv] with which `linear` multiplies, contiguous and in the dtype of `like`.

    Known are plain weights, tensors with `dequantize` (torchao), layers with `dequantized` and FP8
    with scales of blocks (Transformers' FP8Linear). Any other layer is applied to the unit vectors:
    a weight with adapters, one packed under another name (`qweight`, `weight_packed`), or a layer
    with hooks or a `forward` of its own.

    Args:
        linear: the layer, without a bias.
        like: a tensor of the model's dtype and device; latents [T, Lkv] where there is no `weight`.
    """
    weight: Any = getattr(linear, "weight", None)
    scale: Any = getattr(linear, "weight_scale_inv", None)
    if is_plain(linear):
        return weight.to(like.dtype)
    own = _is_changed(linear)
    if hasattr(linear, "dequantized") and not own:
        return linear.dequantized(like.dtype)
    if isinstance(linear, nn.Linear) and type(weight) not in (*_PLAIN, type(None)) and not own:
        return weight.dequantize().to(like.dtype)
    if scale is not None and not own:
        return _of_blocks(weight, scale, cast(Any, linear).block_size).to(like.dtype)
    columns = like.shape[-1] if weight is None else weight.shape[1]
    units = torch.eye(columns, dtype=like.dtype, device=like.device)
    return linear(units).detach().t().contiguous()


def is_plain(linear: Any) -> bool:
    """Whether the layer multiplies with its weight, which is a tensor in full precision."""
    weight: Any = getattr(linear, "weight", None)
    is_linear = type(linear).forward is nn.Linear.forward
    known = is_linear or hasattr(linear, "weight_scale_inv")  # which may hold no FP8
    known = known and not _is_changed(linear)
    return known and type(weight) in _PLAIN and weight.is_floating_point() and weight.itemsize > 1


def _is_changed(linear: Any) -> bool:
    """Whether a call of this layer computes something else than its class says."""
    return bool("forward" in vars(linear) or linear._forward_hooks or linear._forward_pre_hooks)


def _of_blocks(
    weight: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int] | None
) -> torch.Tensor:
    """FP8 [M, Lkv] as float32; scales are one, or one a block of rows and columns."""
    wide = weight.float()
    if block_size is None:
        return wide * scale.float()
    rows, columns = (
        torch.arange(size, device=weight.device) // block
        for size, block in zip(weight.shape, block_size, strict=True)
    )
    return wide * scale.float()[rows[:, None], columns]
