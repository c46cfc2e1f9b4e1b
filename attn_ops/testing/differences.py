"""Where two results differ most: request, row and head, with both values.

T tokens, N query heads, H head size.
"""

import torch

from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.testing.features import TOLERANCE


def expect(right: bool, message: str) -> None:
    """Raise an AssertionError unless `right`; `python -O` keeps it, unlike an assert."""
    if not right:
        raise AssertionError(message)


def check_close(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    dtype: torch.dtype,
    common: CommonAttentionMetadata,
    least: float = 0.0,
    elementwise: bool = False,
) -> None:
    """Raise an AssertionError that names the largest difference, unless `got` is right.

    Args:
        name: what is compared, for the message.
        got: [T, N, H], or [T, N] of the log-sum-exp.
        want: the same in float64.
        dtype: what `got` must have.
        common: the batch; it says whose row one is.
        least: an error that is right for any dtype.
        elementwise: the largest difference counts, and infinite values must be equal; else the
            norm of all differences by the norm of `want`.
    """
    expect(isinstance(got, torch.Tensor), f"{name} must be a tensor, got {type(got).__name__}")
    expect(got.shape == want.shape, f"{name} must be {list(want.shape)}, got {list(got.shape)}")
    expect(got.dtype == dtype, f"{name} must have dtype {dtype}, got {got.dtype}")
    got, want = got.double().cpu(), want.double().cpu()
    difference = torch.where(got == want, 0.0, (got - want).abs())  # inf - inf is NaN
    difference = difference.nan_to_num(nan=float("inf"))
    if elementwise:
        error, limit, kind = float(difference.max()) if got.numel() else 0.0, least, "difference"
    else:
        error = float(difference.norm() / want.norm().clamp(min=1e-30))
        limit, kind = max(TOLERANCE[dtype], least), "relative error"
    if error <= limit:
        return
    raise AssertionError(
        f"{name}: {kind} {error:.2e} is above {limit:.1e}; the largest difference is at "
        f"{place_of(difference, got, want, common)}"
    )


def place_of(
    difference: torch.Tensor,
    got: torch.Tensor,
    want: torch.Tensor,
    common: CommonAttentionMetadata,
) -> str:
    """The largest difference, in words."""
    flat = int(difference.flatten().argmax())
    row, head, *element = (int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
    values = f"got {got.flatten()[flat]:.6g}, want {want.flatten()[flat]:.6g}"
    column = f", element {element[0]}" if element else ""
    return f"{request_of(row, common)}, head {head}{column}: {values}"


def request_of(row: int, common: CommonAttentionMetadata) -> str:
    """Whose row one is: request and place in its queries; or a row of padding."""
    starts = common.query_start_loc.tolist()
    if row >= common.num_actual_tokens:
        return f"row {row} (padding)"
    request = max(i for i, start in enumerate(starts[:-1]) if start <= row < starts[i + 1])
    begin, end = starts[request], starts[request + 1]
    length = common.seq_lens.tolist()[request]
    return (
        f"request {request} (seq_len {length}), row {row} "
        f"(query {row - begin} of its {end - begin})"
    )


def check_padding(out: torch.Tensor, num_tokens: int) -> None:
    """Raise an AssertionError unless the rows behind the batch's tokens are zero."""
    wrong = (out[num_tokens:] != 0).flatten(1).any(1).nonzero().flatten().tolist()
    rows = [num_tokens + i for i in wrong]
    expect(not wrong, f"padding rows must be zero, got others in rows {rows}")
