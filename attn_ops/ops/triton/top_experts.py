"""A router's choice: softmax, the highest scores and their weights, in one kernel.

T rows, E experts, TOP_K of them a row.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import (
    early_launch,
    is_rehearsal,
    quick,
    wait_for_inputs,
)
from attn_ops.integers import next_power_of_2


@triton.jit
def top_experts_kernel(
    weights_ptr,  # [T, TOP_K] contiguous
    ids_ptr,  # [T, TOP_K] int64 contiguous
    scores_ptr,  # [T, E], rows of stride
    stride,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PADDED: tl.constexpr,
    SOFTMAX: tl.constexpr,  # of all experts, before the choice
    WEIGHTS: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T,). Found one after the other, as the largest numbers of 64 bits.

    Such a number is a score, whose bits are turned so that integers are ordered as floats are, and
    below it the expert, of which the first one wins.
    """
    e_E = tl.arange(0, E_PADDED)
    inside_E = e_E < E
    k_K = tl.arange(0, K_PADDED)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    score_E = tl.load(scores_ptr + row * stride + e_E, mask=inside_E, other=float("-inf"))
    score_E = score_E.to(tl.float32)
    if SOFTMAX:
        score_E = tl.exp(score_E - tl.max(score_E, 0))
        score_E = score_E / tl.sum(tl.where(inside_E, score_E, 0.0), 0)
    score_E = tl.where(score_E == 0.0, 0.0, score_E)  # of -0, too
    bits_E = tl.where(score_E != score_E, 0x7FFFFFFF, score_E.to(tl.int32, bitcast=True))
    order_E = bits_E ^ ((bits_E >> 31) & 0x7FFFFFFF)
    key_E = (order_E.to(tl.int64) << 32) | (E_PADDED - 1 - e_E).to(tl.int64)
    LOWEST: tl.constexpr = -(2**63)
    key_E = tl.where(inside_E, key_E, LOWEST)
    value_K = tl.full([K_PADDED], float("-inf"), tl.float32)
    id_K = tl.zeros([K_PADDED], tl.int64)
    for i in tl.static_range(TOP_K):
        best = tl.max(key_E, 0)
        order = (best >> 32).to(tl.int32)
        value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        value_K = tl.where(k_K == i, value, value_K)
        id_K = tl.where(k_K == i, E_PADDED - 1 - (best & 0xFFFFFFFF), id_K)
        key_E = tl.where(key_E == best, LOWEST, key_E)
    inside_K = k_K < TOP_K
    if WEIGHTS == "sum":
        value_K = value_K / tl.sum(tl.where(inside_K, value_K, 0.0), 0)
    elif WEIGHTS == "softmax":
        value_K = tl.exp(value_K - tl.max(value_K, 0))
        value_K = value_K / tl.sum(tl.where(inside_K, value_K, 0.0), 0)
    place_K = row * TOP_K + k_K
    tl.store(weights_ptr + place_K, value_K.to(weights_ptr.dtype.element_ty), mask=inside_K)
    tl.store(ids_ptr + place_K, id_K, mask=inside_K)


def launch_top_experts(
    scores: torch.Tensor, top_k: int, softmax: bool, weights: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attn_ops::top_experts` of T rows, at least 1; columns of the scores are contiguous."""
    num_rows, num_experts = scores.shape
    found = torch.empty(num_rows, top_k, dtype=dtype, device=scores.device)
    ids = torch.empty(num_rows, top_k, dtype=torch.int64, device=scores.device)
    padded = max(next_power_of_2(num_experts), 32)
    with torch.cuda.device_of(scores):
        quick(top_experts_kernel, (num_rows,))(
            found, ids, scores, scores.stride(0), E=num_experts, E_PADDED=padded, TOP_K=top_k,
            K_PADDED=max(next_power_of_2(top_k), 2), SOFTMAX=softmax, WEIGHTS=weights,
            num_warps=max(padded // 256, 1), **early_launch(scores.device),
        )  # fmt: skip
    if is_rehearsal():
        ids.zero_()  # others index by them
    return found, ids
