"""A mixture of experts: pairs of a row and an expert are sorted, multiplied twice, and summed.

    blocks      pairs that share an expert, BLOCK_T at most, one list for both products
    product 1   act(x[pair // top_k] @ gate_up[expert].T)    -> [S, F], by pair
    product 2   that @ down[expert].T                        -> [S, K], by pair
    sum         over a row's experts, in their order, times the routing weights

Sizes of launches follow from T, top_k and E, never from what was routed where: a program without a
block returns. The weight's tile is the left factor as in `skinny.py`, and K is summed in order in
one accumulator: a row's bits depend neither on the other rows nor on a launch's constants.

T rows, S = T * top_k pairs, E experts, K inputs, M outputs, F gated ones, B blocks.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.ops.moe.composite import scale_group
from attn_ops.ops.moe.constants import (
    ExpertsConstants,
    experts_constants,
    most_blocks,
    rows_of_a_block,
)
from attn_ops.ops.triton.fused_products import sum_of

PAIRS_AT_ONCE = (256, 1024, 4096)
"""That a program reads while it sorts: few numbers, as each is compiled."""

BLOCK_SUM = 512
"""Columns of a program that sums."""

GROUP = 8
"""Blocks whose programs follow each other, so that they find weights and rows in the L2 cache."""


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def blocks_kernel(
    pairs_ptr,  # [B, BLOCK_T] int32: pairs of a block in order; -1: none
    expert_ptr,  # [B] int32: the expert of a block; -1: none
    ids_ptr,  # [S] integers; what is no expert is nobody's
    num_pairs,  # S
    num_blocks,  # B
    E: tl.constexpr,
    E_PADDED: tl.constexpr,  # a power of two above E
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,  # pairs at once
    PDL: tl.constexpr,  # launched early
):
    """Grid (E,): a program counts all pairs and lists those of its expert."""
    expert = tl.program_id(0)
    i_C = tl.arange(0, CHUNK)
    e_E = tl.arange(0, E_PADDED)
    wait_for_inputs(PDL)
    count_E = tl.zeros([E_PADDED], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        id_C = tl.load(ids_ptr + begin + i_C, mask=begin + i_C < num_pairs, other=-1).to(tl.int32)
        id_C = tl.where((id_C >= 0) & (id_C < E), id_C, E_PADDED - 1)
        count_E += tl.histogram(id_C, E_PADDED)
    blocks_E = tl.where(e_E < E, (count_E + BLOCK_T - 1) // BLOCK_T, 0)
    first = tl.sum(tl.where(e_E < expert, blocks_E, 0), 0)
    mine = tl.sum(tl.where(e_E == expert, blocks_E, 0), 0)
    place = first.to(tl.int64) * BLOCK_T
    end = place + mine * BLOCK_T
    for begin in range(0, num_pairs, CHUNK):
        id_C = tl.load(ids_ptr + begin + i_C, mask=begin + i_C < num_pairs, other=-1).to(tl.int32)
        is_mine_C = (id_C == expert).to(tl.int32)
        rank_C = tl.cumsum(is_mine_C, 0) - 1
        tl.store(pairs_ptr + place + rank_C, begin + i_C, mask=is_mine_C != 0)
        place += tl.sum(is_mine_C, 0)
    i_T = tl.arange(0, BLOCK_T)
    none_T = tl.full([BLOCK_T], -1, tl.int32)
    tl.store(pairs_ptr + place + i_T, none_T, mask=place + i_T < end)
    for block in range(0, mine):
        tl.store(expert_ptr + first + block, expert)
    if expert == E - 1:
        for block in range(first + mine, num_blocks):
            tl.store(expert_ptr + block, -1)


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """The activation of a gate, times up; both float32."""
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-inner)) * up
    if ACTIVATION == "gpt_oss":
        up += 1.0
    return gate / (1.0 + tl.exp(-alpha * gate)) * up


@triton.jit(do_not_specialize=["num_blocks"])
def experts_kernel(
    out_ptr,  # [S, M] contiguous; [S, F] if GATED
    x_ptr,  # [S // SHARED, K], rows of stride_x
    w_ptr,  # [E, M, K], by stride_we, stride_wm, stride_wk
    bias_ptr,  # [E, M], rows of stride_bias, if HAS_BIAS
    scale_ptr,  # [E, w's rows over SCALE_M, K over SCALE_K] float32 contiguous, if SCALE_M
    pairs_ptr,  # [B, BLOCK_T] int32, if SORTED
    expert_ptr,  # [B] int32 if SORTED; else [S] integers: each pair is a block
    num_blocks,  # B
    stride_x,
    stride_we,
    stride_wm,
    stride_wk,
    stride_bias,
    alpha,
    limit,
    M,  # F if GATED
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,  # pairs that have one row of x
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of w
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_M: tl.constexpr,  # rows of w that share a scale; 0: there are none
    SCALE_K: tl.constexpr,  # inputs that do: BLOCK_K, or all
    SORTED: tl.constexpr,
    GATED: tl.constexpr,
    ROWS_ALONG: tl.constexpr,  # stride_wm is 1
    INTERLEAVED: tl.constexpr,  # rows of gate and up take turns; else gate stands before up
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    WIDEN: tl.constexpr,  # products of float32
    PDL: tl.constexpr,  # launched early
):
    """Grid (B * ceil(M / outputs),), with BLOCK_M outputs a program, half as many if GATED."""
    OUTPUTS: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    num_tiles = tl.cdiv(M, OUTPUTS)
    first = tl.program_id(0) // (GROUP * num_tiles) * GROUP
    inner = tl.program_id(0) % (GROUP * num_tiles)
    in_group = min(num_blocks - first, GROUP)
    block, tile = first + inner % in_group, inner // in_group
    i_M = tl.arange(0, BLOCK_M)
    i_T = tl.arange(0, BLOCK_T)
    k_K = tl.arange(0, BLOCK_K)
    o_O = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if not GATED:
        row_M, inside_M = o_O, o_O < M
    elif INTERLEAVED:
        row_M = tile * BLOCK_M + i_M
        inside_M = row_M < 2 * M
    else:
        row_M = tile * OUTPUTS + i_M % OUTPUTS
        inside_M = row_M < M
        row_M += i_M // OUTPUTS * M
    safe_M = tl.where(inside_M, row_M, 0)
    wait_for_inputs(PDL)
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    if SORTED:
        pair_T = tl.load(pairs_ptr + block.to(tl.int64) * BLOCK_T + i_T)
    else:
        pair_T = tl.where(i_T == 0, block, -1)
    inside_T = pair_T >= 0
    pair_T = tl.where(inside_T, pair_T, 0).to(tl.int64)
    # after a `where`, Triton no longer knows that rows lie side by side, and loads them one by one
    w_M = row_M if ROWS_ALONG else safe_M
    w_ptr_MK = w_ptr + expert * stride_we + w_M.to(tl.int64)[:, None] * stride_wm
    w_ptr_MK += k_K[None, :] * stride_wk
    x_ptr_TK = x_ptr + (pair_T // SHARED)[:, None] * stride_x + k_K[None, :]
    if SCALE_M:
        num_w_rows = 2 * M if GATED else M
        scales_K: tl.constexpr = (K + SCALE_K - 1) // SCALE_K
        scale_M = expert * tl.cdiv(num_w_rows, SCALE_M) + safe_M // SCALE_M
        scale_ptr_M = scale_ptr + scale_M * scales_K
    acc_MT = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    for begin in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            if ROWS_ALONG:
                w_MK = tl.load(w_ptr_MK, mask=inside_M[:, None], other=0.0)
            else:
                w_MK = tl.load(w_ptr_MK)
            x_TK = tl.load(x_ptr_TK, mask=inside_T[:, None], other=0.0)
        else:
            inside_K = begin + k_K < K
            inside_MK = inside_K[None, :] & (inside_M[:, None] | (not ROWS_ALONG))
            w_MK = tl.load(w_ptr_MK, mask=inside_MK, other=0.0)
            x_TK = tl.load(x_ptr_TK, mask=inside_T[:, None] & inside_K[None, :], other=0.0)
        if WIDEN:
            w_MK, x_TK = w_MK.to(tl.float32), x_TK.to(tl.float32)
        elif SCALE_M:  # E4M3 fits into each type of x
            w_MK = w_MK.to(x_ptr.dtype.element_ty)
        if SCALE_M and SCALE_K < K:
            part_MT = tl.dot(w_MK, x_TK.T, input_precision="ieee")
            acc_MT += part_MT * tl.load(scale_ptr_M + begin // BLOCK_K)[:, None]
        else:
            acc_MT = tl.dot(w_MK, x_TK.T, acc_MT, input_precision="ieee")
        w_ptr_MK += BLOCK_K * stride_wk
        x_ptr_TK += BLOCK_K
    if SCALE_M and SCALE_K >= K:
        acc_MT *= tl.load(scale_ptr_M)[:, None]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_BIAS:  # the sum is rounded twice, as a product and an addition do
        bias_M = tl.load(bias_ptr + expert * stride_bias + safe_M).to(tl.float32)
        acc_MT = acc_MT.to(DTYPE).to(tl.float32) + bias_M[:, None]
    if GATED:
        acc_MT = acc_MT.to(DTYPE).to(tl.float32)
        if INTERLEAVED:
            both_OT2 = tl.permute(tl.reshape(acc_MT, [OUTPUTS, 2, BLOCK_T]), [0, 2, 1])
        else:
            both_OT2 = tl.permute(tl.reshape(acc_MT, [2, OUTPUTS, BLOCK_T]), [1, 2, 0])
        gate_OT, up_OT = tl.split(both_OT2)
        acc_MT = activated(gate_OT, up_OT, alpha, limit, ACTIVATION, LIMITED)
    out_ptr_OT = out_ptr + pair_T[None, :] * M + o_O[:, None]
    tl.store(out_ptr_OT, acc_MT.to(DTYPE), mask=(o_O < M)[:, None] & inside_T[None, :])


@triton.jit
def sum_kernel(
    out_ptr,  # [T, K] contiguous
    y_ptr,  # [S, K] contiguous
    ids_ptr,  # [S] integers
    weights_ptr,  # [S]
    residual_ptr,  # [T, K], rows of stride_residual, if RESIDUAL
    stride_residual,
    E: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,  # a weighted row is held in the dtype of y
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T, ceil(K / BLOCK)): in float32, in the order of a row's experts."""
    k_K = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    sum_K = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = row * TOP_K + i
        expert = tl.load(ids_ptr + pair)
        is_there = (expert >= 0) & (expert < E)
        y_K = tl.load(y_ptr + pair * K + k_K, mask=(k_K < K) & is_there, other=0.0)
        y_K = y_K.to(tl.float32) * tl.where(is_there, tl.load(weights_ptr + pair), 0).to(tl.float32)
        if ROUNDED:
            y_K = y_K.to(y_ptr.dtype.element_ty).to(tl.float32)
        sum_K += y_K
    out_K = sum_K.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        out_K = sum_of(
            out_K, tl.load(residual_ptr + row * stride_residual + k_K, mask=k_K < K, other=0.0)
        )
    tl.store(out_ptr + row * K + k_K, out_K, mask=k_K < K)


class Blocks(NamedTuple):
    """Which pairs each program multiplies, by which expert."""

    expert: torch.Tensor  # [B] int32, -1: none; the ids themselves where each pair is a block
    pairs: torch.Tensor | None  # [B, BLOCK_T] int32, -1: none; None: each pair is a block
    block_t: int

    @property
    def number(self) -> int:
        return self.expert.numel()


def launch_blocks(ids: torch.Tensor, num_experts: int, block_t: int) -> Blocks:
    """Sort ids [S] of E experts into blocks of `block_t` pairs."""
    num_pairs, new = ids.numel(), {"dtype": torch.int32, "device": ids.device}
    number = most_blocks(num_pairs, num_experts, block_t)
    expert = torch.empty(number, **new)
    pairs = torch.empty(number, block_t, **new)
    padded = max(next_power_of_2(num_experts + 1), 32)
    chunk = next((n for n in PAIRS_AT_ONCE if n >= num_pairs), PAIRS_AT_ONCE[-1])
    with torch.cuda.device_of(ids):  # Triton launches on the current device
        quick(blocks_kernel, (num_experts,))(
            pairs, expert, ids, num_pairs, number, E=num_experts, E_PADDED=padded,
            BLOCK_T=block_t, CHUNK=chunk, **early_launch(ids.device),
            num_warps=4 if chunk <= 1024 else 8,
        )  # fmt: skip
    return Blocks(expert, pairs, block_t)


def launch_product(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    num_pairs: int,
    constants: ExpertsConstants,
    activation: str | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    scale: torch.Tensor | None = None,
    widen: bool = False,
) -> torch.Tensor:
    """Rows of x [T, K] or [S, K] times w [E, M, K] of their experts -> [S, M].

    With an activation, the first half of the M outputs gates the second one -> [S, F].
    """
    (num_experts, m, k), gated = w.shape, activation is not None
    outputs = m // 2 if gated else m
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    columns = constants.block_m // 2 if gated else constants.block_m
    given = bias if bias is None or bias.stride(1) == 1 else bias.contiguous()
    scale_m, scale_k = (0, k) if scale is None else scale_group(w, scale)
    assert scale_k >= k or scale_k == constants.block_k, "bits would depend on the constants"
    arguments: dict[str, Any] = {
        "E": num_experts,
        "K": k,
        "SHARED": num_pairs // x.shape[0],
        "BLOCK_T": blocks.block_t,
        "BLOCK_M": constants.block_m,
        "BLOCK_K": constants.block_k,
        "GROUP": GROUP,
        "HAS_BIAS": bias is not None,
        "SCALE_M": scale_m,
        "SCALE_K": scale_k,
        "SORTED": blocks.pairs is not None,
        "GATED": gated,
        "ROWS_ALONG": w.stride(1) == 1,
        "INTERLEAVED": interleaved,
        "ACTIVATION": activation,
        "LIMITED": limit is not None,
        "WIDEN": widen,
        "num_warps": constants.num_warps,
        "num_stages": constants.num_stages,
        **early_launch(x.device),
    }
    with torch.cuda.device_of(x):
        quick(experts_kernel, (blocks.number * cdiv(outputs, columns),))(
            out, x, w,
            out if given is None else given,
            out if scale is None else scale.contiguous(),
            blocks.expert if blocks.pairs is None else blocks.pairs,
            blocks.expert, blocks.number, x.stride(0), *w.stride(),
            0 if given is None else given.stride(0),
            alpha, 0.0 if limit is None else limit, outputs, **arguments,
        )  # fmt: skip
    return out


def launch_sum(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Rows y [S, K] times weights [T, top_k], summed by row of T, plus residual -> [T, K]."""
    (num_rows, top_k), k = weights.shape, y.shape[1]
    out = torch.empty(num_rows, k, dtype=y.dtype, device=y.device)
    rounded = torch.promote_types(y.dtype, weights.dtype) == y.dtype
    with torch.cuda.device_of(y):
        quick(sum_kernel, (num_rows, cdiv(k, BLOCK_SUM)))(
            out, y, ids, weights, out if residual is None else residual,
            0 if residual is None else residual.stride(0), E=num_experts, K=k, TOP_K=top_k,
            BLOCK=BLOCK_SUM, ROUNDED=rounded, RESIDUAL=residual is not None, num_warps=4,
            **early_launch(y.device),
        )  # fmt: skip
    return out


def launch_experts(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    residual: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    constants: ExpertsConstants | None = None,
    widen: bool = False,
) -> torch.Tensor:
    """`attn_ops::experts` by kernels; T is at least 1, and columns of x are contiguous.

    Args:
        constants: overrides the choice.
        widen: multiply float32, as the interpreter must for bfloat16.
    """
    num_experts = w_gate_up.shape[0]
    ids, weights = expert_ids.contiguous().view(-1), weights.contiguous()
    num_pairs = ids.numel()
    forms = [
        constants or _constants(w, scale, num_pairs)
        for w, scale in ((w_gate_up, gate_up_scale), (w_down, down_scale))
    ]
    if x.shape[0] == 1:  # experts of a row differ, and there is nothing to sort
        blocks = Blocks(ids, None, rows_of_a_block(1, 1))
    else:
        blocks = launch_blocks(ids, num_experts, forms[0].block_t)
    gate = {"alpha": alpha, "limit": limit, "interleaved": interleaved, "widen": widen}
    h = launch_product(
        x, w_gate_up, gate_up_bias, blocks, num_pairs, forms[0], activation, scale=gate_up_scale,
        **gate,
    )  # fmt: skip
    y = launch_product(
        h, w_down, down_bias, blocks, num_pairs, forms[1], scale=down_scale, widen=widen
    )
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    return launch_sum(y, ids, weights, num_experts, residual)


def _constants(w: torch.Tensor, scale: torch.Tensor | None, num_pairs: int) -> ExpertsConstants:
    """For a product with w [E, M, K]."""
    num_experts, _, k = w.shape
    scale_k = k if scale is None else scale_group(w, scale)[1]
    along = w.stride(1) == 1
    return experts_constants(k, num_pairs, num_experts, along, scale_k if scale_k < k else None)
