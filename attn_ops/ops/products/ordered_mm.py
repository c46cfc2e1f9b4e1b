"""Products whose rows do not depend on how many rows there are: what `ordered=True` means.

Our kernels sum K in order, in one accumulator, whatever their tiles. The library does the same
wherever it does not split K, and is faster for many rows. So it is tried, once for each weight's
shape and number of rows: on random numbers its bits must be ours. Rows are padded to few numbers,
which are then all that is tried.

T rows of x, K inputs, M outputs.
"""

import torch

from attn_ops.ops.products.skinny_constants import is_measured, most_rows


def takes_ordered(w: torch.Tensor, device: torch.device) -> bool:
    """Whether products with w [K, M] can be had in order."""
    return (
        is_measured(device)
        and w.dtype in (torch.bfloat16, torch.float16)
        and w.stride(0) == 1
        and w.shape[0] % 16 == 0
        and w.stride(1) % 16 == 0
    )


def padded_rows(num_rows: int) -> int:
    """The number of rows that a product of so many is computed with by the library."""
    step = 16 if num_rows <= 1024 else 64 if num_rows <= 2048 else 256
    return -(-num_rows // step) * step


def new_rows(num_rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Empty [T, columns], behind which lies room for the rows that the library wants."""
    return like.new_empty(padded_rows(num_rows), columns)[:num_rows]


def _with_room(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] and what lies behind it, as many rows as the library wants; copied if it is short.

    A row depends on no other: what the rest holds is of no concern.
    """
    wanted = padded_rows(x.shape[0])
    end = x.storage_offset() + (wanted - 1) * x.stride(0) + x.shape[1]
    if end * x.element_size() <= x.untyped_storage().nbytes():
        return x.as_strided((wanted, x.shape[1]), x.stride())
    more = x.new_empty(wanted, x.shape[1])
    more[: x.shape[0]] = x
    return more


def ordered_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] @ w [K, M] + bias [M] -> [T, M].

    Raises:
        ValueError: there is no kernel for w in order.
    """
    if not takes_ordered(w, x.device) or x.stride(1) != 1:
        raise ValueError(
            "w must be bfloat16 or float16 with contiguous columns of a multiple of 16 inputs on a "
            f"Hopper GPU for ordered=True, got {w.dtype} {list(w.shape)} on {x.device}"
        )
    from attn_ops.ops.triton.skinny import launch_skinny

    num_rows = x.shape[0]
    if num_rows <= most_rows(w) or not _library_is_ordered(padded_rows(num_rows), w, bias):
        return launch_skinny(x, w, bias, None, None, x.dtype)
    return _of_library(_with_room(x), w, bias)[:num_rows]


def _of_library(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ w if bias is None else torch.addmm(bias, x, w)


_TRIED: dict[tuple[int, int, int, bool, torch.dtype, torch.device], bool] = {}
"""(T, K, M, has bias, dtype, device) of products that were tried, and whether the library may
compute them. Global: a property of the libraries and the device."""


def tried_products() -> str:
    """What computes products of which many rows, in a line for reports."""
    ours = [
        f"{k} x {m}{' with bias' if bias else ''} of {rows} rows"
        for (rows, k, m, bias, *_), equal in _TRIED.items()
        if not equal
    ]
    said = f"the library in {len(_TRIED) - len(ours)} of {len(_TRIED)} shapes that were tried"
    return f"{said}, ours in {', '.join(ours)}" if ours else said


def _library_is_ordered(num_rows: int, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the library's bits are ours; no, where a capture has begun before it was tried."""
    (k, m), dtype, device = w.shape, w.dtype, w.device
    key = (num_rows, k, m, bias is not None, dtype, device)
    if key not in _TRIED and not torch.cuda.is_current_stream_capturing():
        from attn_ops.ops.triton.skinny import launch_skinny

        generator = torch.Generator(device).manual_seed(0)
        like = {"dtype": dtype, "device": device, "generator": generator}
        try:
            x, other = torch.randn(num_rows, k, **like), torch.randn(m, k, **like).t()
            some = None if bias is None else torch.randn(m, **like)
            ours = launch_skinny(x, other, some, None, None, dtype)
            _TRIED[key] = torch.equal(_of_library(x, other, some), ours)
        except torch.OutOfMemoryError:
            _TRIED[key] = False
    return _TRIED.get(key, False)
