"""RoPE of DeepSeek-V2 without complex numbers, where it is traced; longrope by request.

Transformers rotates pairs of columns as complex numbers. Inductor has no code for those: each of
their operators becomes a kernel, and the cache's write is not fused. Dynamo also guards on more
than one token there. Eager calls stay the model's own.

T rows of the batch, N heads, R columns.
"""

import sys
from typing import Any

import torch
from torch import nn

SHIFT = 1 << 40
"""Added to all positions of a request whose prompt is longer than longrope's original context."""


class LongRope(nn.Module):
    """Rotary embedding of longrope with the factors of each row's own request.

    Transformers takes the long factors for all rows where one of them is beyond the original
    context. Here rows with SHIFT take them; calls without such rows are Transformers' own.
    """

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope
        self.original: int = rope.config.rope_parameters["original_max_position_embeddings"]

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, T] -> cosines and sines [1, T, R] in x's dtype."""
        shifted = position_ids >= SHIFT
        position = torch.where(shifted, position_ids - SHIFT, position_ids)
        is_long = shifted | (torch.where(shifted, 0, position).max() >= self.original)
        beyond = torch.full_like(position[:, :1], self.original)
        cos_long, sin_long = self.rope(x, torch.cat([position, beyond], 1))
        cos, sin = self.rope(x, torch.where(is_long, 0, position))
        where = is_long.unsqueeze(-1)
        return torch.where(where, cos_long[:, :-1], cos), torch.where(where, sin_long[:, :-1], sin)


def follow_requests(model: nn.Module, max_tokens: int) -> None:
    """Make longrope follow requests, where they may be longer than the original context."""
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        rope: Any = module
        inside = isinstance(model.get_submodule(parent), LongRope)
        # PhiMoE's, without this buffer, asks for the longest position on the host.
        if getattr(rope, "rope_type", None) != "longrope" or inside:
            continue
        if hasattr(rope, "original_inv_freq"):
            longer = LongRope(rope)
            if max_tokens > longer.original:
                setattr(model.get_submodule(parent), own, longer)


def rope_boundary(model: nn.Module) -> int | None:
    """Tokens beyond which a request has other RoPE; None: no module of the model follows that."""
    return min((m.original for m in model.modules() if isinstance(m, LongRope)), default=None)


def trace_real_rotary(layer: Any) -> None:
    """Have Dynamo trace `real_rotary` for the `apply_rotary_emb` of the layer's module.

    Harmless if repeated, and for layers whose module has no such function.
    """
    module = sys.modules[type(layer).__module__]
    original = getattr(module, "apply_rotary_emb", None)
    if original is None or getattr(original, "is_traced_real", False):
        return
    torch.compiler.substitute_in_graph(original)(real_rotary)
    original.is_traced_real = True


def real_rotary(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each pair of columns of xq [1, N, T, R] and xk [1, 1, T, R].

    Args:
        freqs_cis: [1, T, R / 2] complex64, cosine and sine of a pair's angle.
    """
    cos, sin = torch.view_as_real(freqs_cis.unsqueeze(1)).unbind(-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2].float(), x[..., 1::2].float()
        pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return pairs.flatten(3).type_as(x)

    return rotated(xq), rotated(xk)
