"""`attn_ops::rms_norm` and `attn_ops::add_rms_norm`: norms of rows, in one order for any batch.

On a GPU a program sums a row's squares in float32, in an order that K alone decides. A compiler
decides it by the number of rows that it has seen first.
"""

import math

import torch

from attn_ops.ops.library import operator


def check_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, name: str = "weight") -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    if x.dim() < 2 or not x.dtype.is_floating_point:
        raise ValueError(
            f"x must have shape [..., K] and a floating-point dtype, got {x.dtype} {list(x.shape)}"
        )
    if weight.shape != x.shape[-1:] or weight.device != x.device:
        raise ValueError(
            f"{name} must have shape [{x.shape[-1]}] on {x.device}, got {list(weight.shape)} on "
            f"{weight.device}"
        )
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and at least 0, got {eps}")


def _check_added(x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check_norm(x, weight, eps)
    if addend.shape != x.shape or addend.dtype != x.dtype:
        raise ValueError(
            f"addend must be {x.dtype} of x's shape {list(x.shape)}, got {addend.dtype} "
            f"{list(addend.shape)}"
        )


@operator(fake=lambda x, weight, eps: x.new_empty(x.shape), check=check_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * weight, of each row.

    Args:
        x: [..., K].
        weight: [K].
        eps: added to the mean square of a row.

    Returns:
        [..., K] contiguous, in x's dtype; computed in float32, or in float64 for such x.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return normed(x.reshape(-1, x.shape[-1]), None, weight, eps)[1].view(x.shape)


@operator(fake=lambda x, *more: (x.new_empty(x.shape), x.new_empty(x.shape)), check=_check_added)
def add_rms_norm(
    x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend, and `rms_norm` of the sum.

    Args:
        x, addend: [..., K].
        weight: [K].
        eps: added to the mean square of a row.

    Returns:
        Both [..., K] contiguous, in x's dtype, to which the sum is rounded first.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows, more = (t.reshape(-1, x.shape[-1]) for t in (x, addend))
    total, result = normed(rows, more, weight, eps)
    return total.view(x.shape), result.view(x.shape)


def by_kernels(x: torch.Tensor) -> bool:
    """Whether kernels of ours compute what stands between products, in float32."""
    wide = x.dtype == torch.float64
    return x.shape[0] > 0 and x.stride(1) == 1 and x.device.type == "cuda" and not wide


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normed(
    x: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend [T, K], and its RMSNorm by weight + offset; x itself without an addend."""
    if by_kernels(x) and (addend is None or addend.stride(1) == 1):
        from attn_ops.ops.triton.rows import launch_rms_norm

        return launch_rms_norm(x, addend, weight, eps, offset)
    total = x if addend is None else x + addend
    wide = widened(total)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (wide * (widened(weight) + offset)).to(x.dtype)
