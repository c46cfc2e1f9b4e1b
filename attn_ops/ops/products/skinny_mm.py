"""`attn_ops::skinny_mm`: a matrix product that reads the weight fast when there are few rows.

T rows of x, K inputs, M outputs.
"""

from typing import Any

import torch

from attn_ops.ops.library import operator
from attn_ops.ops.products.ordered_mm import ordered_product
from attn_ops.ops.products.skinny_constants import is_measured, most_rows

_FP8 = torch.float8_e4m3fn


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    ordered: bool = False,
) -> None:
    """Raise a ValueError that names the first argument that does not fit."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"x and w must have shapes [T, K] and [K, M], got {list(x.shape)} and {list(w.shape)}"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"w must have the dtype of x {x.dtype}, got {w.dtype}")
    scaled = x.dtype == _FP8
    if scaled != (x_scale is not None) or scaled != (w_scale is not None):
        raise ValueError(
            f"x_scale and w_scale must be tensors if and only if x is {_FP8}, got x {x.dtype}, "
            f"x_scale {type(x_scale).__name__}, w_scale {type(w_scale).__name__}"
        )
    if not scaled and out_dtype not in (None, x.dtype):
        raise ValueError(f"out_dtype must be None or x's dtype {x.dtype}, got {out_dtype}")
    if scaled and ordered:
        raise ValueError(f"x must be bfloat16 or float16 for ordered=True, got {x.dtype}")
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"bias must have shape [{w.shape[1]}], got {list(bias.shape)}")


def _skinny_mm_fake(
    x: torch.Tensor, w: torch.Tensor, *bias: object, out_dtype: Any = None, **more: object
) -> torch.Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=out_dtype or x.dtype)


@operator(fake=_skinny_mm_fake, check=_check)
def skinny_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    ordered: bool = False,
) -> torch.Tensor:
    """x @ w + bias, by a kernel for few rows where that is faster, else by cuBLAS.

    A row's result depends neither on the other rows nor on how many there are, as long as our
    kernel computes it: it sums in one order.

    Args:
        x: [T, K] bfloat16, float16 or float8_e4m3fn; other dtypes go to cuBLAS.
        w: [K, M] in x's dtype, a transposed weight: the kernel takes stride 1 along K.
        bias: [M].
        x_scale: [T, 1] or [1] float32, by which rows of FP8 x are multiplied.
        w_scale: [1, M] or [1] float32, the same of w's columns.
        out_dtype: of FP8's result; None is x's dtype.
        fast_accum: sums of FP8 may keep the 14 bits that Hopper's tensor cores have; False: they
            are added in float32 after 128 terms.
        ordered: a row's bits do not depend on the number of rows, whatever computes them; on Hopper
            GPUs alone (`attn_ops.ops.products.ordered_mm`).

    Returns:
        [T, M] contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit, or scales are given for other dtypes than FP8;
            `ordered` cannot be had.
    """
    if ordered and x.shape[0] > 0:
        return ordered_product(x, w, bias)
    return product(x, w, bias, x_scale, w_scale, out_dtype, fast_accum)


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """`skinny_mm` of checked arguments, for other operators."""
    if is_skinny(x.shape[0], w, x.device) and x.stride(1) == 1:
        from attn_ops.ops.triton.skinny import launch_skinny

        return launch_skinny(
            x, w, bias, x_scale, w_scale, out_dtype or x.dtype, fast_accum=fast_accum
        )
    if x.shape[0] == 0:
        return torch.empty(0, w.shape[1], dtype=out_dtype or x.dtype, device=x.device)
    if x_scale is not None and w_scale is not None:
        return torch._scaled_mm(x, w, x_scale, w_scale, bias, None, out_dtype, fast_accum)
    return x @ w if bias is None else torch.addmm(bias, x, w)


def is_skinny(num_rows: int, w: torch.Tensor, device: torch.device) -> bool:
    """Whether our kernel computes a product with w [K, M], instead of the library."""
    return 0 < num_rows <= most_rows(w) and takes(w, device)


def takes(w: torch.Tensor, device: torch.device) -> bool:
    """Whether our kernel can multiply by w [K, M], here and faster than the library."""
    return (
        is_measured(device)
        and w.dtype in (torch.bfloat16, torch.float16, _FP8)
        and w.stride(0) == 1
        and w.shape[0] % 128 == 0
        and w.stride(1) % 16 == 0
    )
