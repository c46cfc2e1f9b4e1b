"""Prompts of layers with a state, a block of rows at a time: products of matrices.

What a state becomes over a block of rows, and what the rows read of it, are products with the state
before the block, so a program goes from block to block where kernels of `triton.states` go from row
to row: https://arxiv.org/abs/2412.06464 (delta rules), https://arxiv.org/abs/2405.21060 (Mamba-2).
What needs no state is computed for all blocks at a time before. Where rows begin and end is read on
the device here too. Operands of products, states and scores among them, have the dtype of rows, so
this is for bfloat16: float16 has too small a range. What a program holds fits into the 99 KB of
shared memory that small GPUs have for K up to 128 and N up to 256. Decodes and short prompts of a
batch stay with kernels of `triton.states`. A row that is not finite spoils its whole block, of its
own request, also the rows before it.

Names of sizes are those of `triton.states`; R rows of a block, J the same rows as columns, and X is
K where every key has a decay, else 1.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.ops.triton.state_rows import Batch, step_size

LONG = 32
"""Rows of a request from which on this is worth it: on an H100 20 to 33 us, 1.3 a row without."""

ROWS = 32
"""Of a block."""

ROWS_OF_KDA = 16
"""Its pairs of rows have a decay for every key, so that they are no product: fewer are better."""

WIDTH = 32
"""Columns of a delta rule's state, or rows of Mamba-2's, that a program holds."""

WARPS = 4


@triton.jit
def long_request(slots_ptr, starts_ptr, seq_lens_ptr, num_requests, LONG: tl.constexpr):
    """The program's request, the n-th of those with LONG rows or more, padding too: its number,
    slot, first row, number of rows, tokens that its state has seen. No rows: there are fewer, or it
    is padding.
    """
    wanted = tl.program_id(2) + 1
    request, num_found = num_requests, 0
    for s in range(0, num_requests, 128):
        s_S = s + tl.arange(0, 128)
        inside_S = s_S < num_requests
        first_S = tl.load(starts_ptr + s_S, mask=inside_S, other=0)
        is_long_S = tl.load(starts_ptr + s_S + 1, mask=inside_S, other=0) - first_S >= LONG
        number_S = num_found + tl.cumsum(is_long_S.to(tl.int32), 0)
        is_it_S = is_long_S & (number_S == wanted)
        request = tl.minimum(request, tl.min(tl.where(is_it_S, s_S, num_requests)))
        num_found += tl.sum(is_long_S.to(tl.int32))
    found = request < num_requests
    slot = tl.load(slots_ptr + request, mask=found, other=0).to(tl.int64)
    first = tl.load(starts_ptr + request, mask=found, other=0).to(tl.int64)
    end = tl.load(starts_ptr + request + 1, mask=found, other=0).to(tl.int64)
    length = tl.where(slot > 0, end - first, 0)
    num_seen = tl.load(seq_lens_ptr + request, mask=found, other=0).to(tl.int64) - length
    return request, slot, first, length, num_seen


@triton.jit
def rows_of_head(ptr, strides, row_R, head, x_X, inside_RX):
    """[R, X] of a head of [T, H, X], and 0 where `inside_RX` says so."""
    ptr_RX = ptr + row_R[:, None] * strides[0] + head * strides[1] + x_X[None, :] * strides[2]
    return tl.load(ptr_RX, mask=inside_RX, other=0.0)


@triton.jit
def bounded(g):
    """What exp makes 0 of, it does from -100 on: sums keep their digits. NaN stays."""
    return tl.where(g < -100.0, -100.0, g)


@triton.jit
def kept_row(kept_R, n):
    """Of a block's rows behind which the state is kept, the n-th: which it is, and its slot."""
    number_R = tl.cumsum((kept_R > 0).to(tl.int32), 0)
    is_it_R = (kept_R > 0) & (number_R == n + 1)
    return is_it_R, tl.sum(tl.where(is_it_R, kept_R, 0)).to(tl.int64)


@triton.jit
def normal(x_RK):
    return x_RK * tl.rsqrt(tl.sum(x_RK * x_RK, 1) + 1e-6)[:, None]


@triton.jit
def inverse_of_one_and(lower_RJ, r_R, ROWS: tl.constexpr):
    """The inverse of 1 + lower, which has numbers below its diagonal alone.

    In blocks of 4 by its series, which ends there; then two blocks become one, again and again. A
    series over more rows has powers that grow, where keys are alike, and cancel.
    """
    inner_RJ = tl.where(r_R[:, None] // 4 == r_R[None, :] // 4, lower_RJ, 0.0)
    square_RJ = tl.dot(inner_RJ, inner_RJ, input_precision="tf32x3")
    found_RJ = (r_R[:, None] == r_R[None, :]).to(lower_RJ.dtype) - inner_RJ
    found_RJ += tl.dot(found_RJ, square_RJ, input_precision="tf32x3")
    for double in tl.static_range(3, 6):
        if ROWS >= 2**double:
            is_one = r_R[:, None] >> double == r_R[None, :] >> double
            were_two = r_R[:, None] >> (double - 1) != r_R[None, :] >> (double - 1)
            between_RJ = tl.where(is_one & were_two, lower_RJ, 0.0)
            taken_RJ = tl.dot(found_RJ, between_RJ, input_precision="tf32x3")
            found_RJ -= tl.dot(taken_RJ, found_RJ, input_precision="tf32x3")
    return found_RJ


@triton.jit(do_not_specialize=["num_requests"])
def delta_rule_blocks_kernel(
    read_ptr,  # [T, H, K] contiguous, as all that is written
    queries_ptr,  # [T, H, K]
    left_ptr,  # [T, H, K]
    written_ptr,  # [T, H, V]
    scores_ptr,  # [T, H, R]
    decays_ptr,  # [T // R + S + 1, H], or [.., H, K] with KEY_DECAY; float32
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    v_ptr,  # [T, H, V]
    g_ptr,  # [T, H], or [T, H, K] with KEY_DECAY
    beta_ptr,  # [T, H]
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    num_requests,  # S
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    beta_strides,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # H / G
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,  # V, and more
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    SCALE: tl.constexpr,  # of q
    KEY_DECAY: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    """What rows of a block have to do with each other, whatever the state is. Grid (programs, H,
    long requests at most).

    A row changes the state by `value - what the state has at its key`, less what the block's rows
    before it have changed there: a system of equations. Its solution for a state S is
    `written - read S`. A row's result is `queries S + scores changes`, and behind the block the
    state is `decays S + left^T changes`.
    """
    wait_for_inputs(PDL)
    request, _slot, first, length, _num_seen = long_request(
        slots_ptr, starts_ptr, seq_lens_ptr, num_requests, LONG
    )
    head = tl.program_id(1)
    key_head = head // GROUP
    r_R, k_K, v_V = tl.arange(0, ROWS), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    DTYPE: tl.constexpr = read_ptr.dtype.element_ty
    for block in range(tl.program_id(0), tl.cdiv(length, ROWS), tl.num_programs(0)):
        row_R = first + block * ROWS + r_R
        inside_R = row_R < first + length
        inside_RK = inside_R[:, None] & (k_K < K)[None, :]
        inside_RV = inside_R[:, None] & (v_V < V)[None, :]
        q_RK = rows_of_head(q_ptr, q_strides, row_R, key_head, k_K, inside_RK).to(tl.float32)
        k_RK = rows_of_head(k_ptr, k_strides, row_R, key_head, k_K, inside_RK).to(tl.float32)
        if NORMALIZED:
            q_RK, k_RK = normal(q_RK), normal(k_RK)
        q_RK *= SCALE
        place = first // ROWS + block + request  # that no other block has
        if KEY_DECAY:
            g_RK = rows_of_head(g_ptr, g_strides, row_R, head, k_K, inside_RK).to(tl.float32)
            g_RK = bounded(g_RK)
            since_RX, whole_X = tl.cumsum(g_RK, 0), tl.sum(g_RK, 0)
            tl.store(decays_ptr + (place * H + head) * K + k_K, tl.exp(whole_X), mask=k_K < K)
            g_K = tl.zeros([BLOCK_K], tl.float32)
            keys_RJ = tl.zeros([ROWS, ROWS], tl.float32)
            scores_RJ = tl.zeros([ROWS, ROWS], tl.float32)
            for j in range(0, tl.minimum(ROWS, length - block * ROWS)):
                row = first + block * ROWS + j
                g_ptr_K = g_ptr + row * g_strides[0] + head * g_strides[1] + k_K * g_strides[2]
                g_K += bounded(tl.load(g_ptr_K, mask=k_K < K, other=0.0).to(tl.float32))
                k_ptr_K = k_ptr + row * k_strides[0] + key_head * k_strides[1] + k_K * k_strides[2]
                key_K = tl.load(k_ptr_K, mask=k_K < K, other=0.0).to(tl.float32)
                if NORMALIZED:
                    key_K *= tl.rsqrt(tl.sum(key_K * key_K) + 1e-6)
                decayed_RK = tl.exp(tl.where((r_R >= j)[:, None], since_RX - g_K[None, :], 0.0))
                decayed_RK *= key_K[None, :]
                is_j_1J = (r_R == j)[None, :]
                keys_RJ = tl.where(is_j_1J, tl.sum(k_RK * decayed_RK, 1)[:, None], keys_RJ)
                scores_RJ = tl.where(is_j_1J, tl.sum(q_RK * decayed_RK, 1)[:, None], scores_RJ)
        else:
            g_ptr_R = g_ptr + row_R * g_strides[0] + head * g_strides[1]
            g_R = bounded(tl.load(g_ptr_R, mask=inside_R, other=0.0).to(tl.float32))
            since_R, whole = tl.cumsum(g_R, 0), tl.sum(g_R, 0)
            tl.store(decays_ptr + place * H + head, tl.exp(whole))
            since_RX, whole_X = since_R[:, None], whole[None]
            decay_RJ = since_RX - since_R[None, :]
            decay_RJ = tl.exp(tl.where(r_R[:, None] >= r_R[None, :], decay_RJ, 0.0))
            key_KJ = tl.trans(k_RK.to(DTYPE))
            keys_RJ = tl.dot(k_RK.to(DTYPE), key_KJ) * decay_RJ
            scores_RJ = tl.dot(q_RK.to(DTYPE), key_KJ) * decay_RJ
        at_RK = (row_R[:, None] * H + head) * K + k_K[None, :]
        queries_RK, left_RK = q_RK * tl.exp(since_RX), k_RK * tl.exp(whole_X[None, :] - since_RX)
        tl.store(queries_ptr + at_RK, queries_RK.to(DTYPE), mask=inside_RK)
        tl.store(left_ptr + at_RK, left_RK.to(DTYPE), mask=inside_RK)
        scores_RJ = tl.where(r_R[:, None] >= r_R[None, :], scores_RJ, 0.0)
        at_RJ = (row_R[:, None] * H + head) * ROWS + r_R[None, :]
        tl.store(scores_ptr + at_RJ, scores_RJ.to(DTYPE), mask=inside_R[:, None])
        beta_ptr_R = beta_ptr + row_R * beta_strides[0] + head * beta_strides[1]
        beta_R = tl.load(beta_ptr_R, mask=inside_R, other=0.0).to(tl.float32)
        keys_RJ = tl.where(r_R[:, None] > r_R[None, :], keys_RJ * beta_R[:, None], 0.0)
        solve_RJ = (inverse_of_one_and(keys_RJ, r_R, ROWS) * beta_R[None, :]).to(DTYPE)
        read_RK = tl.dot(solve_RJ, (k_RK * tl.exp(since_RX)).to(DTYPE))
        tl.store(read_ptr + at_RK, read_RK.to(DTYPE), mask=inside_RK)
        v_RV = rows_of_head(v_ptr, v_strides, row_R, head, v_V, inside_RV)
        at_RV = (row_R[:, None] * H + head) * V + v_V[None, :]
        tl.store(written_ptr + at_RV, tl.dot(solve_RJ, v_RV).to(DTYPE), mask=inside_RV)


@triton.jit(do_not_specialize=["num_requests"])
def delta_rule_chunks_kernel(
    out_ptr,  # [T, H, V] contiguous
    read_ptr,  # of the kernel above
    queries_ptr,
    left_ptr,
    written_ptr,
    scores_ptr,
    decays_ptr,
    k_ptr,  # as there
    g_ptr,
    states_ptr,  # [P, H, K, V]
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    kept_ptr,  # [T] or None
    num_requests,  # S
    k_strides,
    g_strides,
    states_strides,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # H / G
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    KEY_DECAY: tl.constexpr,
    NORMALIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`delta_rule_kernel` by blocks. Grid (ceil(V / BLOCK_V), H, long requests at most)."""
    wait_for_inputs(PDL)
    request, slot, first, length, num_seen = long_request(
        slots_ptr, starts_ptr, seq_lens_ptr, num_requests, LONG
    )
    head = tl.program_id(1)
    r_R, k_K = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_K, inside_V = k_K < K, v_V < V
    inside_KV = inside_K[:, None] & inside_V[None, :]
    pool_ptr_KV = states_ptr + head * states_strides[1]
    pool_ptr_KV += k_K[:, None] * states_strides[2] + v_V[None, :] * states_strides[3]
    state_ptr_KV = pool_ptr_KV + slot * states_strides[0]
    DTYPE: tl.constexpr = read_ptr.dtype.element_ty
    if length > 0:
        mask_KV = inside_KV & (num_seen != 0)
        state_KV = tl.load(state_ptr_KV, mask=mask_KV, other=0.0).to(tl.float32)
        place = first // ROWS + request
        for block in range(0, tl.cdiv(length, ROWS)):
            row_R = first + block * ROWS + r_R
            inside_R = row_R < first + length
            inside_RK = inside_R[:, None] & inside_K[None, :]
            inside_RV = inside_R[:, None] & inside_V[None, :]
            at_RK = (row_R[:, None] * H + head) * K + k_K[None, :]
            at_RV = (row_R[:, None] * H + head) * V + v_V[None, :]
            at_RJ = (row_R[:, None] * H + head) * ROWS + r_R[None, :]
            if kept_ptr is not None:  # here, as what follows hides how long a load takes
                kept_R = tl.load(kept_ptr + row_R, mask=inside_R, other=0)
            read_RK = tl.load(read_ptr + at_RK, mask=inside_RK, other=0.0)
            written_RV = tl.load(written_ptr + at_RV, mask=inside_RV, other=0.0)
            held_KV = state_KV.to(DTYPE)
            change_RV = (written_RV - tl.dot(read_RK, held_KV)).to(DTYPE)
            queries_RK = tl.load(queries_ptr + at_RK, mask=inside_RK, other=0.0)
            scores_RJ = tl.load(scores_ptr + at_RJ, mask=inside_R[:, None], other=0.0)
            y_RV = tl.dot(scores_RJ, change_RV, tl.dot(queries_RK, held_KV))
            tl.store(out_ptr + at_RV, y_RV.to(out_ptr.dtype.element_ty), mask=inside_RV)
            left_RK = tl.load(left_ptr + at_RK, mask=inside_RK, other=0.0)
            if KEY_DECAY:
                decays_ptr_K = decays_ptr + ((place + block) * H + head) * K + k_K
                decay_K1 = tl.load(decays_ptr_K, mask=inside_K, other=0.0)[:, None]
            else:
                decay_K1 = tl.load(decays_ptr + (place + block) * H + head)
            if kept_ptr is not None:
                for n in range(0, tl.sum((kept_R > 0).to(tl.int32))):
                    is_it_R, kept_slot = kept_row(kept_R, n)
                    k_RK = rows_of_head(k_ptr, k_strides, row_R, head // GROUP, k_K, inside_RK)
                    k_RK = k_RK.to(tl.float32)
                    if NORMALIZED:
                        k_RK = normal(k_RK)
                    if KEY_DECAY:
                        g_RX = rows_of_head(g_ptr, g_strides, row_R, head, k_K, inside_RK)
                        since_RX = tl.cumsum(bounded(g_RX.to(tl.float32)), 0)
                    else:  # Triton 3.6 does not compile a scan of one column
                        g_ptr_R = g_ptr + row_R * g_strides[0] + head * g_strides[1]
                        g_R = tl.load(g_ptr_R, mask=inside_R, other=0.0)
                        since_RX = tl.cumsum(bounded(g_R.to(tl.float32)), 0)[:, None]
                    up_to_X = tl.sum(tl.where(is_it_R[:, None], since_RX, 0.0), 0)
                    before_R = r_R <= tl.sum(tl.where(is_it_R, r_R, 0))
                    since_RX = tl.where(before_R[:, None], up_to_X[None, :] - since_RX, 0.0)
                    so_far_RK = tl.where(before_R[:, None], k_RK * tl.exp(since_RX), 0.0)
                    decayed_KV = state_KV * tl.exp(up_to_X)[:, None]
                    behind_KV = tl.dot(tl.trans(so_far_RK.to(DTYPE)), change_RV, decayed_KV)
                    kept_ptr_KV = pool_ptr_KV + kept_slot * states_strides[0]
                    tl.store(kept_ptr_KV, behind_KV.to(states_ptr.dtype.element_ty), mask=inside_KV)
            state_KV = tl.dot(tl.trans(left_RK), change_RV, state_KV * decay_K1)
        tl.store(state_ptr_KV, state_KV.to(states_ptr.dtype.element_ty), mask=inside_KV)


@triton.jit(do_not_specialize=["num_requests"])
def ssd_chunks_kernel(
    out_ptr,  # [T, H, V] contiguous
    x_ptr,  # [T, H, V]
    dt_ptr,  # [T, H]
    A_ptr,  # [H]
    B_ptr,  # [T, G, N]
    C_ptr,  # [T, G, N]
    D_ptr,  # [H] or None
    dt_bias_ptr,  # [H] or None
    prompt_lens_ptr,  # [S], if step sizes are clamped
    states_ptr,  # [P, H, V, N]
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    kept_ptr,  # [T] or None
    num_requests,  # S
    x_strides,
    dt_strides,
    A_strides,
    B_strides,
    C_strides,
    D_strides,
    dt_bias_strides,
    prompt_lens_strides,
    states_strides,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # H / G
    V: tl.constexpr,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    DT_MIN: tl.constexpr,  # in rows of prompts; None: no bound
    DT_MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """`ssd_kernel` by blocks. Grid (ceil(V / BLOCK_V), H, long requests at most)."""
    wait_for_inputs(PDL)
    request, slot, first, length, num_seen = long_request(
        slots_ptr, starts_ptr, seq_lens_ptr, num_requests, LONG
    )
    head = tl.program_id(1)
    group = head // GROUP
    r_R, n_N = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_V, inside_N = v_V < V, n_N < N
    inside_VN = inside_V[:, None] & inside_N[None, :]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    pool_ptr_VN = states_ptr + head * states_strides[1]
    pool_ptr_VN += v_V[:, None] * states_strides[2] + n_N[None, :] * states_strides[3]
    state_ptr_VN = pool_ptr_VN + slot * states_strides[0]
    if length > 0:
        A = tl.load(A_ptr + head * A_strides[0]).to(tl.float32)
        if DT_MIN is not None or DT_MAX is not None:
            prompt_len_ptr = prompt_lens_ptr + request * prompt_lens_strides[0]
            num_prompt = tl.load(prompt_len_ptr).to(tl.int64) - num_seen  # rows of the prompt
        mask_VN = inside_VN & (num_seen != 0)
        state_VN = tl.load(state_ptr_VN, mask=mask_VN, other=0.0).to(tl.float32)
        up_to_RJ = r_R[:, None] >= r_R[None, :]
        for begin in range(0, length, ROWS):
            inside_R = begin + r_R < length
            row_R = first + begin + r_R
            inside_RN = inside_R[:, None] & inside_N[None, :]
            inside_RV = inside_R[:, None] & inside_V[None, :]
            if kept_ptr is not None:  # here, as what follows hides how long a load takes
                kept_R = tl.load(kept_ptr + row_R, mask=inside_R, other=0)
            x_RV = rows_of_head(x_ptr, x_strides, row_R, head, v_V, inside_RV)
            B_RN = rows_of_head(B_ptr, B_strides, row_R, group, n_N, inside_RN).to(DTYPE)
            C_RN = rows_of_head(C_ptr, C_strides, row_R, group, n_N, inside_RN).to(DTYPE)
            dt_ptr_R = dt_ptr + row_R * dt_strides[0] + head * dt_strides[1]
            dt_R = tl.load(dt_ptr_R, mask=inside_R, other=0.0)
            bias_at = head * dt_bias_strides[0]
            dt_R = step_size(dt_R, dt_bias_ptr, bias_at, length > 0, SOFTPLUS, tl.float32)
            if DT_MIN is not None:
                in_prompt_R = begin + r_R < num_prompt
                dt_R = tl.where(
                    in_prompt_R & (dt_R < DT_MIN), tl.full((), DT_MIN, tl.float32), dt_R
                )
            if DT_MAX is not None:
                in_prompt_R = begin + r_R < num_prompt
                dt_R = tl.where(
                    in_prompt_R & (dt_R > DT_MAX), tl.full((), DT_MAX, tl.float32), dt_R
                )
            dt_R = tl.where(inside_R, dt_R, 0.0)
            decay_R = bounded(dt_R * A)
            since_R, whole = tl.cumsum(decay_R, 0), tl.sum(decay_R)
            added_RV = x_RV * dt_R[:, None]
            decay_RJ = tl.exp(tl.where(up_to_RJ, since_R[:, None] - since_R[None, :], 0.0))
            scores_RJ = tl.where(up_to_RJ, tl.dot(C_RN, tl.trans(B_RN)) * decay_RJ, 0.0)
            y_RV = tl.dot(C_RN, tl.trans(state_VN.to(DTYPE))) * tl.exp(since_R)[:, None]
            y_RV = tl.dot(scores_RJ.to(DTYPE), added_RV.to(DTYPE), y_RV)
            if kept_ptr is not None:
                for n in range(0, tl.sum((kept_R > 0).to(tl.int32))):
                    is_it_R, kept_slot = kept_row(kept_R, n)
                    up_to = tl.sum(tl.where(is_it_R, since_R, 0.0))
                    before_R = r_R <= tl.sum(tl.where(is_it_R, r_R, 0))
                    decay_R = tl.exp(tl.where(before_R, up_to - since_R, 0.0))
                    left_RV = tl.where(before_R[:, None], added_RV * decay_R[:, None], 0.0)
                    decayed_VN = state_VN * tl.exp(up_to)
                    behind_VN = tl.dot(tl.trans(left_RV.to(DTYPE)), B_RN, decayed_VN)
                    kept_ptr_VN = pool_ptr_VN + kept_slot * states_strides[0]
                    tl.store(kept_ptr_VN, behind_VN.to(states_ptr.dtype.element_ty), mask=inside_VN)
            left_RV = (added_RV * tl.exp(whole - since_R)[:, None]).to(DTYPE)
            state_VN = tl.dot(tl.trans(left_RV), B_RN, state_VN * tl.exp(whole))
            if D_ptr is not None:
                y_RV += x_RV * tl.load(D_ptr + head * D_strides[0]).to(tl.float32)
            out_ptr_RV = out_ptr + (row_R[:, None] * H + head) * V + v_V[None, :]
            tl.store(out_ptr_RV, y_RV.to(out_ptr.dtype.element_ty), mask=inside_RV)
        tl.store(state_ptr_VN, state_VN.to(states_ptr.dtype.element_ty), mask=inside_VN)


# -- launches --------------------------------------------------------------------------------------


def may_have_long(rows: torch.Tensor, batch: Batch) -> bool:
    """Whether to launch these kernels; without them, long requests go by rows too.

    As many rows as requests are taken for decodes; where states are kept behind rows, up to 8 times
    as many for decodes with drafts.
    """
    slots, kept = batch[0], batch[3]
    rows_of_each, left = divmod(rows.shape[0], max(1, slots.numel()))
    decodes = not left and rows_of_each <= (1 if kept is None else 8)
    return rows.dtype == torch.bfloat16 and not decodes and _most_long(rows, slots) > 0


def _most_long(rows: torch.Tensor, slots: torch.Tensor) -> int:
    return min(slots.numel(), rows.shape[0] // LONG)


def _sizes(whole: int, part: int) -> tuple[int, int]:
    """Of the sides of a state that a program holds: one whole, and columns of the other."""
    whole, part = (max(16, next_power_of_2(size)) for size in (whole, part))
    return whole, min(part, WIDTH)


def launch_delta_rule(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalized: bool,
    states: torch.Tensor,
    batch: Batch,
) -> None:
    """Rows of long requests of `gated_delta_rule`; of `kda` where g has three dimensions."""
    (num_rows, heads, size), keys = v.shape, q.shape[2]
    slots, starts, seq_lens, kept = (None if x is None else x.contiguous() for x in batch)
    assert slots is not None, "only kept may be None"
    padded, block = _sizes(keys, size)
    block_rows = ROWS_OF_KDA if g.dim() == 3 else ROWS
    by_key = [v.new_empty((num_rows, heads, keys)) for _ in range(3)]
    scores = v.new_empty((num_rows, heads, block_rows))
    num_blocks = num_rows // block_rows + slots.numel() + 1
    decays = v.new_empty((num_blocks, *g.shape[1:]), dtype=torch.float32)
    parts = (*by_key, torch.empty_like(out), scores, decays)
    strides = [x.stride() for x in (q, k, v, g, beta)]
    places, long = (slots, starts, seq_lens, slots.numel()), _most_long(v, slots)
    shared = {
        "H": heads, "GROUP": heads // q.shape[1], "K": keys, "V": size, "BLOCK_K": padded,
        "ROWS": block_rows, "LONG": LONG, "KEY_DECAY": g.dim() == 3, "NORMALIZED": normalized,
        "num_warps": WARPS,
    }  # fmt: skip
    with torch.cuda.device_of(out):
        # Of a request: as many as it may have blocks, but few programs that find nothing to do.
        programs = min(cdiv(num_rows, block_rows), max(4, 256 // long))
        quick(delta_rule_blocks_kernel, (programs, heads, long))(
            *parts, q, k, v, g, beta, *places, *strides,
            BLOCK_V=max(16, next_power_of_2(size)), SCALE=keys**-0.5, **shared,
            **early_launch(out.device),
        )  # fmt: skip
        quick(delta_rule_chunks_kernel, (cdiv(size, block), heads, long))(
            out, *parts, k, g, states, *places[:3], kept, places[3], k.stride(), g.stride(),
            states.stride(), BLOCK_V=block, **shared, **early_launch(out.device),
        )  # fmt: skip


def launch_ssd(
    out: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    prompt_lens: torch.Tensor | None,
    softplus: bool,
    limits: tuple[float | None, float | None],
    states: torch.Tensor,
    batch: Batch,
) -> None:
    """Rows of long requests of `ssd_state_update`."""
    (heads, size), (groups, width) = x.shape[1:], B.shape[1:]
    padded, block = _sizes(width, size)
    tensors = (x, dt, A, B, C, D, dt_bias, prompt_lens, states)
    strides = [(0,) if x is None else x.stride() for x in tensors]
    slots, starts, seq_lens, kept = (None if x is None else x.contiguous() for x in batch)
    assert slots is not None, "only kept may be None"
    with torch.cuda.device_of(out):
        quick(ssd_chunks_kernel, (cdiv(size, block), heads, _most_long(x, slots)))(
            out, *tensors, slots, starts, seq_lens, kept, slots.numel(), *strides,
            H=heads, GROUP=heads // groups, V=size, N=width, BLOCK_V=block, BLOCK_N=padded,
            ROWS=ROWS, LONG=LONG, SOFTPLUS=softplus, DT_MIN=limits[0], DT_MAX=limits[1],
            num_warps=WARPS, **early_launch(out.device),
        )  # fmt: skip
