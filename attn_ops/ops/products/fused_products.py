"""`attn_ops::norm_mm` and `attn_ops::gated_mlp`: products with their norms, gates and additions.

For few rows each product is one kernel with its norm, gate and additions. For more rows the same
is computed by the library's products and a kernel between each two.

T rows, K inputs, M outputs, F columns of a gate.
"""

import torch

from attn_ops.ops.library import operator
from attn_ops.ops.products.norms import by_kernels, check_norm, normed, widened
from attn_ops.ops.products.ordered_mm import ordered_product, takes_ordered
from attn_ops.ops.products.skinny_mm import is_skinny, product, takes

MOST_ROWS = 16
"""Of the kernels that compute it all."""

MOST_ROWS_WITHOUT_NORM = 64
"""Of those that compute all but the norm."""


def _check(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_offset: float = 0.0,
    ordered: bool = False,
) -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0] or x.dtype != w.dtype:
        raise ValueError(
            "x and w must have shapes [T, K] and [K, M] and one dtype, "
            f"got {x.dtype} {list(x.shape)} and {w.dtype} {list(w.shape)}"
        )
    check_norm(x, norm_weight, eps, "norm_weight")
    for name, other in (("w", w), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {other.device}")
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"bias must have shape [{w.shape[1]}], got {list(bias.shape)}")


@operator(
    fake=lambda x, norm_weight, eps, w, *bias, **more: x.new_empty((x.shape[0], w.shape[1])),
    check=_check,
)
def norm_mm(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_offset: float = 0.0,
    ordered: bool = False,
) -> torch.Tensor:
    """RMSNorm(x) @ w + bias.

    Of at most 16 rows one kernel computes it on Hopper GPUs: a row's result then depends neither
    on the other rows nor on how many there are.

    Args:
        x: [T, K].
        norm_weight: [K].
        eps: added to the mean square of a row.
        w: [K, M] in x's dtype, a transposed weight: the kernel takes stride 1 along K.
        bias: [M].
        norm_offset: added to `norm_weight`, as Gemma has it.
        ordered: a row's result never depends on the other rows, as `skinny_mm` has it.

    Returns:
        [T, M] contiguous, in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit; `ordered` cannot be had.
    """
    if ordered and x.shape[0] > 0:
        return ordered_product(normed(x, None, norm_weight, eps, norm_offset)[1], w, bias)
    if _is_fused(x, w):
        from attn_ops.ops.triton.fused_products import launch_fused

        norm = {"norm_weight": norm_weight, "norm_offset": norm_offset, "eps": eps}
        return launch_fused(x, w, bias=bias, **norm)
    return product(normed(x, None, norm_weight, eps, norm_offset)[1], w, bias)


def _check_mlp(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    norm_offset: float = 0.0,
    ordered: bool = False,
) -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    _check(x, norm_weight, eps, w_gate_up)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must be {x.dtype} of x's shape {list(x.shape)}, "
            f"got {residual.dtype} {list(residual.shape)}"
        )
    wanted = [w_gate_up.shape[1] // 2, x.shape[1]]
    if w_gate_up.shape[1] % 2 or list(w_down.shape) != wanted or w_down.dtype != x.dtype:
        raise ValueError(
            f"w_gate_up and w_down must be {x.dtype} of shapes [K, 2 * F] and [F, K], got "
            f"{list(w_gate_up.shape)} and {w_down.dtype} {list(w_down.shape)}"
        )


@operator(fake=lambda x, *other, **more: x.new_empty(x.shape), check=_check_mlp)
def gated_mlp(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    norm_offset: float = 0.0,
    ordered: bool = False,
) -> torch.Tensor:
    """h + (SiLU(y @ gate) * (y @ up)) @ w_down, with h = x + residual and y = RMSNorm(h).

    Of at most 16 rows two kernels compute it on Hopper GPUs, as `norm_mm` says.

    Args:
        x, residual: [T, K].
        norm_weight: [K].
        eps: added to the mean square of a row.
        w_gate_up: [K, 2 * F], the gate's columns before those of up.
        w_down: [F, K].
        norm_offset: added to `norm_weight`, as Gemma has it.
        ordered: a row's result never depends on the other rows, as `skinny_mm` has it.

    Returns:
        [T, K] contiguous, in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit; `ordered` cannot be had.
    """
    if ordered and x.shape[0] > 0:
        rows = normed(x, residual, norm_weight, eps, norm_offset)
        return _ordered_mlp(*rows, w_gate_up, w_down)
    if _is_fused(x, w_gate_up, w_down) and residual.stride(1) == 1:
        from attn_ops.ops.triton.fused_products import launch_fused

        norm = {"norm_weight": norm_weight, "norm_offset": norm_offset, "eps": eps}
        gated = launch_fused(x, w_gate_up, addend=residual, gated=True, **norm)
        return launch_fused(gated, w_down, residuals=(x, residual))
    total, rows = normed(x, residual, norm_weight, eps, norm_offset)
    gated = _gated(product(rows, w_gate_up))
    autocast = gated.dtype != total.dtype
    if autocast or is_skinny(gated.shape[0], w_down, gated.device):
        return total + product(gated, w_down)
    return total.addmm_(gated, w_down)  # `total` is a new tensor


def _ordered_mlp(
    total: torch.Tensor, rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """`gated_mlp` behind a norm by a kernel of its own, which has one order for any rows."""
    fits = all(takes_ordered(w, rows.device) for w in (w_gate_up, w_down))
    if fits and rows.shape[0] <= MOST_ROWS_WITHOUT_NORM:
        from attn_ops.ops.triton.fused_products import launch_fused

        gated = launch_fused(rows, w_gate_up, gated=True)
        return launch_fused(gated, w_down, residuals=(total,))
    return total + ordered_product(_gated(ordered_product(rows, w_gate_up, None)), w_down, None)


def takes_fused(w: torch.Tensor, device: torch.device) -> bool:
    """Whether there is a kernel for few rows of w [K, M] with what stands around the product.

    It multiplies before it divides by a row's norm, which float16 cannot hold.
    """
    return w.dtype == torch.bfloat16 and takes(w, device)


def _is_fused(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    few = 0 < x.shape[0] <= MOST_ROWS and x.stride(1) == 1
    return few and all(takes_fused(w, x.device) for w in weights)


def _gated(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the columns, times the second half."""
    if by_kernels(x):
        from attn_ops.ops.triton.rows import launch_silu_mul

        return launch_silu_mul(x)
    gate, up = widened(x).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
