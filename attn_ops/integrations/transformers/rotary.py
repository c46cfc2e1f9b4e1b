"""RoPE of DeepSeek-V2 without complex numbers, where it is traced.

Transformers rotates pairs of columns as complex numbers. Inductor has no code for those: each of
their operators becomes a kernel, and the cache's write is not fused. Dynamo also guards on more
than one token there. Eager calls stay the model's own.

T rows of the batch, N heads, R columns.
"""

import sys
from typing import Any

import torch


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
