"""Attention of many query rows over up-projected keys: q and k have other columns than v.

A program owns BLOCK_M query rows of one request and one head. The columns of q and k are taken in
two parts whose sizes are powers of two: 192 would be padded to 256.

T rows of q, Tk rows of k and v, S requests, N heads, H columns of q and k (F of the first part,
E of the rest), V columns of v, C keys of a tile, M rows of a program.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_ops.backends.triton.prefill import find_request
from attn_ops.backends.triton.tiles import LN_2, LOG2_E, widened
from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import next_power_of_2


@triton.jit
def attend_dense(
    acc_MV,
    max_M,
    sum_M,
    q_MF,
    q_ME,
    position_M,  # of each row among the keys
    k_ptr,  # of the request's first key and this head
    v_ptr,
    num_keys,
    begin,
    end,
    stride_k_token,
    stride_v_token,
    score_scale,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of begin..end
):
    """Streaming softmax, base 2, float32: acc_MV (not normalized), max_M, sum_M."""
    f_F = tl.arange(0, FIRST)
    e_E = tl.arange(0, PADDED_REST)
    v_V = tl.arange(0, PADDED_VALUE)
    for start in range(begin, end, TILE):
        key_C = start + tl.arange(0, TILE)
        if MASKED:
            valid_C = key_C < num_keys
        else:
            valid_C = tl.full([TILE], 1, tl.int1)
        k_row_C = key_C.to(tl.int64) * stride_k_token
        if COLUMNS < FIRST:
            mask_CF = valid_C[:, None] & (f_F < COLUMNS)[None, :]
        else:
            mask_CF = tl.broadcast_to(valid_C[:, None], [TILE, FIRST])
        k_CF = tl.load(
            k_ptr + k_row_C[:, None] + f_F[None, :],
            mask=mask_CF,
            other=0.0,
        )
        k_CF = k_CF.to(q_MF.dtype)
        score_MC = tl.dot(q_MF, tl.trans(k_CF), input_precision="ieee")
        if REST > 0:
            if REST == PADDED_REST:
                mask_CE = tl.broadcast_to(valid_C[:, None], [TILE, PADDED_REST])
            else:
                mask_CE = valid_C[:, None] & (e_E < REST)[None, :]
            k_CE = tl.load(k_ptr + FIRST + k_row_C[:, None] + e_E[None, :], mask=mask_CE, other=0.0)
            k_CE = k_CE.to(q_MF.dtype)
            score_MC = tl.dot(q_ME, tl.trans(k_CE), score_MC, input_precision="ieee")
        score_MC *= score_scale
        if MASKED:
            visible_MC = valid_C[None, :]
            if CAUSAL:
                visible_MC = visible_MC & (key_C[None, :] <= position_M[:, None])
            score_MC = tl.where(visible_MC, score_MC, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MC, 1))
        base_M = new_max_M
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MC = tl.exp2(score_MC - base_M[:, None])
        rescale_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * rescale_M + tl.sum(weight_MC, 1)
        if VALUE == PADDED_VALUE:
            mask_CV = tl.broadcast_to(valid_C[:, None], [TILE, PADDED_VALUE])
        else:
            mask_CV = valid_C[:, None] & (v_V < VALUE)[None, :]
        v_row_C = key_C.to(tl.int64) * stride_v_token
        v_CV = tl.load(v_ptr + v_row_C[:, None] + v_V[None, :], mask=mask_CV, other=0.0)
        acc_MV = tl.dot(
            weight_MC.to(q_MF.dtype), v_CV.to(q_MF.dtype), acc_MV * rescale_M[:, None],
            input_precision="ieee",
        )  # fmt: skip
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "lse_ptr"],
)
def prefill_kernel(
    out_ptr,  # [T, N, VALUE] contiguous
    q_ptr,  # [T, N, FIRST + REST]
    k_ptr,  # [Tk, N, FIRST + REST]
    v_ptr,  # [Tk, N, VALUE]
    cu_q_ptr,  # [S + 1] int32
    cu_k_ptr,  # [S + 1] int32
    lse_ptr,  # [T, N] float32 contiguous, natural log, if HAS_LSE
    stride_q_row,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    num_reqs,
    num_rows,  # T
    score_scale,
    NUM_HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (T // BLOCK_M + S + 1, N). Programs of a head are neighbours: its keys stay in L2."""
    wait_for_inputs(PDL)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows see most keys: they go first
    head = tl.program_id(1)
    # Rows behind the last request are request S, which has no keys: they come out zero.
    request = find_request(cu_q_ptr, program, num_reqs, BLOCK_M)
    known = request < num_reqs
    row_begin = tl.load(cu_q_ptr + request)
    row_end = tl.load(cu_q_ptr + request + 1, mask=known, other=num_rows)
    key_begin = tl.load(cu_k_ptr + request).to(tl.int64)
    key_end = tl.load(cu_k_ptr + request + 1, mask=known, other=0).to(tl.int64)
    query_len = row_end - row_begin
    num_keys = tl.maximum(key_end - key_begin, 0).to(tl.int32)
    first = (program - row_begin // BLOCK_M - request) * BLOCK_M
    if first >= query_len:
        return
    query_M = first + tl.arange(0, BLOCK_M)
    owned_M = query_M < query_len
    row_M = (row_begin + query_M).to(tl.int64)
    q_ptr += head.to(tl.int64) * stride_q_head
    f_F = tl.arange(0, FIRST)
    e_E = tl.arange(0, PADDED_REST)
    v_V = tl.arange(0, PADDED_VALUE)
    q_row_M = row_M * stride_q_row
    mask_MF = owned_M[:, None] & (f_F < COLUMNS)[None, :]
    q_MF = tl.load(q_ptr + q_row_M[:, None] + f_F[None, :], mask=mask_MF, other=0.0)
    q_ME = tl.load(
        q_ptr + FIRST + q_row_M[:, None] + e_E[None, :],
        mask=owned_M[:, None] & (e_E < REST)[None, :],
        other=0.0,
    )
    if WIDEN:
        q_MF = q_MF.to(tl.float32)
        q_ME = q_ME.to(tl.float32)
    # Keys that some row sees, and those before them that all rows see, which need no mask.
    position_M = num_keys - query_len + query_M
    end = num_keys
    all_end = num_keys // TILE * TILE
    if CAUSAL:
        last = tl.minimum(first + BLOCK_M, query_len) - 1
        end = num_keys - query_len + last + 1
        all_end = tl.maximum(num_keys - query_len + first + 1, 0) // TILE * TILE
    k_ptr += key_begin * stride_k_token + head.to(tl.int64) * stride_k_head
    v_ptr += key_begin * stride_v_token + head.to(tl.int64) * stride_v_head
    acc_MV = tl.zeros([BLOCK_M, PADDED_VALUE], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MV, max_M, sum_M = attend_dense(
        acc_MV, max_M, sum_M, q_MF, q_ME, position_M, k_ptr, v_ptr, num_keys, 0, all_end,
        stride_k_token, stride_v_token, score_scale, COLUMNS, FIRST, REST, PADDED_REST, VALUE,
        PADDED_VALUE, TILE, CAUSAL, False,
    )  # fmt: skip
    acc_MV, max_M, sum_M = attend_dense(
        acc_MV, max_M, sum_M, q_MF, q_ME, position_M, k_ptr, v_ptr, num_keys, all_end, end,
        stride_k_token, stride_v_token, score_scale, COLUMNS, FIRST, REST, PADDED_REST, VALUE,
        PADDED_VALUE, TILE, CAUSAL, True,
    )  # fmt: skip
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    out_row_M = row_M * NUM_HEADS + head
    if HAS_LSE:
        tl.store(lse_ptr + out_row_M, (max_M + tl.log2(total_M)) * LN_2, mask=owned_M)
    tl.store(
        out_ptr + (out_row_M * VALUE)[:, None] + v_V[None, :],
        (acc_MV / total_M[:, None]).to(out_ptr.dtype.element_ty),
        mask=owned_M[:, None] & (v_V < VALUE)[None, :],
    )


class PrefillLaunch(NamedTuple):
    """Constants of a launch."""

    rows: int  # M
    keys: int  # of a tile
    num_warps: int
    num_stages: int


def prefill_launch(max_query_len: int, dtype: torch.dtype, *, aligned: bool) -> PrefillLaunch:
    """By rows; `aligned`: every stride of k and v is a multiple of 16 elements.

    Other strides leave loads of two bytes, which are not loaded ahead. Of that loop ptxas 12.8,
    which comes with Triton 3.6, makes wrong code as soon as its products are those of a warp group:
    20 of 256 forms gave wrong results or left their memory on one H200 (2026-11-23), none by ptxas
    13.0. Less than 64 rows are multiplied warp by warp.
    """
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return PrefillLaunch(16, 16, 8, 1)
    if not aligned:
        return PrefillLaunch(32, 64, 4, 3)
    if max_query_len <= 64:
        return PrefillLaunch(64, 64, 4, 3)
    return PrefillLaunch(128, 64, 8, 3)


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    causal: bool,
    with_lse: bool,
    launch: PrefillLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over each request's own rows of k and v: [T, N, V] contiguous, lse [T, N] or None.

    Rows without keys, and rows of q behind the last request's, become zero, with -inf.

    Args:
        q: [T, N, H]; strides of all three are free but for the last.
        k: [Tk, N, H].
        v: [Tk, N, V].
        cu_q: [S + 1] int32, rows of q before each request's, and all.
        cu_k: [S + 1] int32, the same of k and v.
        max_q: most rows of a request.
        max_k: most keys of a request.
        scale: factor on q.k.
        causal: the last row of a request sees all its keys, the one before all but the last.
        with_lse: natural log of the softmax's denominator, float32.
        launch: overrides the choice.
    """
    num_rows, num_heads, _ = q.shape
    value, num_reqs = v.shape[2], cu_q.shape[0] - 1
    out = torch.empty(num_rows, num_heads, value, dtype=q.dtype, device=q.device)
    lse = None
    if with_lse:
        lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    if num_rows == 0:
        return out, lse
    strides = (*k.stride()[:2], *v.stride()[:2])
    launch = launch or prefill_launch(
        max_q, q.dtype, aligned=all(stride % 16 == 0 for stride in strides)
    )
    quick(prefill_kernel, (num_rows // launch.rows + num_reqs + 1, num_heads))(
        out,
        q,
        k,
        v,
        cu_q,
        cu_k,
        out if lse is None else lse,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        num_reqs,
        num_rows,
        scale * LOG2_E.value,
        NUM_HEADS=num_heads,
        **_columns(q.shape[2], value),
        BLOCK_M=launch.rows,
        TILE=launch.keys,
        CAUSAL=causal,
        HAS_LSE=with_lse,
        WIDEN=widened(q.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **early_launch(q.device),
    )
    return out, lse


def _columns(columns: int, value: int) -> dict[str, int]:
    """The kernel's constants of a head's columns: a power of two of them, and the rest."""
    first = max(1 << (columns.bit_length() - 1), 16)
    rest = max(columns - first, 0)
    return {
        "COLUMNS": columns,
        "FIRST": first,
        "REST": rest,
        "PADDED_REST": max(next_power_of_2(rest), 16),
        "VALUE": value,
        "PADDED_VALUE": max(next_power_of_2(value), 16),
    }
