"""Two attention states made one, see `attn_ops.ops.merge.merge_attn_states`.

T tokens, N query heads, H head size, R pairs (token, head) of one program.
"""

import torch
import triton
import triton.language as tl

from attn_ops.integers import cdiv, next_power_of_2

TILE = 1024
"""Numbers of one program: eight a thread of four warps."""


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def merge_attn_states_kernel(
    out_ptr,  # [T, N, H], contiguous
    lse_ptr,  # [T, N] float32, contiguous
    out1_ptr,  # [T, N, H], contiguous in H
    lse1_ptr,  # [T, N] float32
    out2_ptr,  # [T, N, H], contiguous in H
    lse2_ptr,  # [T, N] float32
    num_rows,  # T * N
    num_heads,
    out1_stride_T,
    out1_stride_N,
    lse1_stride_T,
    lse1_stride_N,
    out2_stride_T,
    out2_stride_N,
    lse2_stride_T,
    lse2_stride_N,
    HEAD_SIZE: tl.constexpr,
    DOUBLE: tl.constexpr,  # accumulate in float64
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (ceil(T * N / ROWS),)."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < num_rows
    token_R, head_R = row_R // num_heads, row_R % num_heads
    none: tl.constexpr = float("-inf")
    lse1_R = tl.load(
        lse1_ptr + token_R * lse1_stride_T + head_R * lse1_stride_N, mask=inside_R, other=none
    )
    lse2_R = tl.load(
        lse2_ptr + token_R * lse2_stride_T + head_R * lse2_stride_N, mask=inside_R, other=none
    )
    top_R = tl.maximum(lse1_R, lse2_R)
    top_R = tl.where(top_R == none, 0.0, top_R)  # -inf - -inf would be NaN
    weight1_R, weight2_R = tl.exp(lse1_R - top_R), tl.exp(lse2_R - top_R)
    total_R = weight1_R + weight2_R
    divisor_R = tl.where(total_R == 0.0, 1.0, total_R)
    lse_R = tl.where(total_R == 0.0, none, top_R + tl.log(divisor_R))
    tl.store(lse_ptr + row_R, lse_R, mask=inside_R)

    h_H = tl.arange(0, BLOCK_H)
    in_head_H = h_H < HEAD_SIZE
    # A part that saw nothing is not read: it may hold NaN.
    mask1_RH = (inside_R & (lse1_R != none))[:, None] & in_head_H
    mask2_RH = (inside_R & (lse2_R != none))[:, None] & in_head_H
    at1_R = token_R * out1_stride_T + head_R * out1_stride_N
    at2_R = token_R * out2_stride_T + head_R * out2_stride_N
    out1_RH = tl.load(out1_ptr + at1_R[:, None] + h_H, mask=mask1_RH, other=0.0)
    out2_RH = tl.load(out2_ptr + at2_R[:, None] + h_H, mask=mask2_RH, other=0.0)
    share1_R, share2_R = weight1_R / divisor_R, weight2_R / divisor_R
    if DOUBLE:
        share1_R, share2_R = share1_R.to(tl.float64), share2_R.to(tl.float64)
    out_RH = out1_RH.to(share1_R.dtype) * share1_R[:, None]
    out_RH += out2_RH.to(share2_R.dtype) * share2_R[:, None]
    tl.store(
        out_ptr + row_R[:, None] * HEAD_SIZE + h_H,
        out_RH.to(out_ptr.dtype.element_ty),
        mask=inside_R[:, None] & in_head_H,
    )


def launch_merge_attn_states(
    out1: torch.Tensor,
    lse1: torch.Tensor,
    out2: torch.Tensor,
    lse2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `merge_attn_states` has checked them."""
    num_tokens, num_heads, head_size = out1.shape
    out_TNH = out1.new_empty(out1.shape)
    lse_TN = lse1.new_empty(lse1.shape)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out_TNH, lse_TN
    out1, out2 = (x if x.stride(2) == 1 else x.contiguous() for x in (out1, out2))
    block_h = next_power_of_2(max(head_size, 1))
    rows = max(1, TILE // block_h)
    with torch.cuda.device_of(out1):
        merge_attn_states_kernel[(cdiv(num_rows, rows),)](
            out_TNH,
            lse_TN,
            out1,
            lse1,
            out2,
            lse2,
            num_rows,
            num_heads,
            *out1.stride()[:2],
            *lse1.stride(),
            *out2.stride()[:2],
            *lse2.stride(),
            HEAD_SIZE=head_size,
            DOUBLE=out1.dtype == torch.float64,
            ROWS=rows,
            BLOCK_H=block_h,
        )
    return out_TNH, lse_TN
