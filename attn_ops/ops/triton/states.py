"""Layers with a state: one kernel a rule, which changes the states of a pool where they are.

A program owns a part of one request's state. It reads that part once, follows the request's rows
from `starts[s]` to `starts[s + 1]`, which only the device knows, and writes it once. A decode is
one turn of that loop; a prompt is as many as it has rows, one after the other, which is right but
slow: a convolution has programs for parts of a prompt, and `triton.chunks` other kernels for long
ones. Padding neither reads nor writes a state, so a captured launch may run on padding alone.
Programs of one request stand beside each other in the grid: so they go over its state in one
stream, of which each takes parts of rows.

T rows of a batch, S requests, P slots of a pool, C channels, L inputs of a convolution, H heads,
G heads of keys or groups of heads, K key size, V value size, N state size. Arguments are those of
`attn_ops.ops.states`. Strides may be any; they come as one tuple a tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.ops.triton import chunks
from attn_ops.ops.triton.state_rows import (
    Batch,
    keep_behind,
    request_rows,
    silu,
    step_size,
    zero_rows,
)


class Tile(NamedTuple):
    """What a program holds."""

    numbers: int  # of a state; of a convolution, channels
    warps: int


TILES: dict[str, Tile] = {
    "causal_conv1d": Tile(512, 4),
    "gated_delta_rule": Tile(4096, 4),
    "kda": Tile(4096, 4),
    "ssd": Tile(4096, 4),
    "selective": Tile(4096, 2),
}
"""By rule; `python -m benchmarks.state_layers` times them.

4,096 numbers of four warps are 32 registers of each thread. Four channels of a convolution are 8
bytes of every input in bfloat16, and the most whose weights a thread reads from few lines.
"""


ROWS = 16
"""Of a prompt, that a program of a convolution goes through, one after the other."""

MOST_PARTS = 512
"""Of the prompts of a step, unless each request has 16: parts that nothing is in cost time, too."""


# -- the rules -------------------------------------------------------------------------------------


@triton.jit
def taps(weight_ptr, strides, c_C, inside_C, L: tl.constexpr, PACKED: tl.constexpr):
    """A tuple of a convolution's weights, [BLOCK_C] of each of the L inputs.

    PACKED: those of a channel are 8 bytes in a row, which are read as one number.
    """
    found_LC = ()
    if PACKED:
        words_ptr = weight_ptr.to(tl.pointer_type(tl.int64))
        word_C = tl.load(words_ptr + c_C, mask=inside_C, other=0)
        BITS: tl.constexpr = 64 // L
        for l in tl.static_range(0, L):
            if BITS == 16:
                part_C = (word_C >> (l * BITS)).to(tl.int16)
            else:
                part_C = (word_C >> (l * BITS)).to(tl.int32)
            found_LC += (part_C.to(weight_ptr.dtype.element_ty, bitcast=True),)
    else:
        for l in tl.static_range(0, L):
            ptr_C = weight_ptr + c_C * strides[0] + l * strides[1]
            found_LC += (tl.load(ptr_C, mask=inside_C, other=0.0),)
    return found_LC


@triton.jit(do_not_specialize=["num_rows"])
def causal_conv1d_kernel(
    out_ptr,  # [T, C] contiguous
    x_ptr,  # [T, C]
    weight_ptr,  # [C, L]
    bias_ptr,  # [C] or None
    states_ptr,  # [P, C, L - 1]
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    kept_ptr,  # [T] or None
    num_rows,  # T
    x_strides,
    weight_strides,
    bias_strides,
    states_strides,
    C: tl.constexpr,
    L: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,  # what sums are computed in
    PDL: tl.constexpr,  # launched early
):
    """Grid (ceil(C / BLOCK_C), row blocks, S). Inputs before the request's rows are its state.

    The first block of rows alone reads the state, so it alone may write it. A vector has one number
    a channel, so that threads read what stands beside each other: in rows, and in states
    as a `StatePool` has them.
    """
    wait_for_inputs(PDL)
    slot, first, length, num_seen, zero_first, zero_end = request_rows(
        slots_ptr, starts_ptr, seq_lens_ptr, num_rows, None
    )
    c_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_C = c_C < C
    weights_LC = taps(weight_ptr, weight_strides, c_C, inside_C, L, PACKED)
    bias_C = tl.zeros([BLOCK_C], ACC)
    if bias_ptr is not None:
        bias_C += tl.load(bias_ptr + c_C * bias_strides[0], mask=inside_C, other=0.0).to(ACC)
    pool_ptr_C = states_ptr + c_C * states_strides[1]
    state_ptr_C = pool_ptr_C + slot * states_strides[0]
    x_ptr_C = x_ptr + first * x_strides[0] + c_C * x_strides[1]
    old_C = inside_C & (num_seen != 0)
    block = tl.program_id(1)
    part = tl.maximum(tl.cdiv(length, tl.num_programs(1)), L)  # rows of a block
    for n in range(block * part, tl.minimum((block + 1) * part, length)):
        inputs_LC = ()
        for l in tl.static_range(0, L):
            row = n + (l - (L - 1))  # of the request's
            new_C = tl.load(x_ptr_C + row * x_strides[0], mask=inside_C & (row >= 0), other=0.0)
            if l < L - 1:
                ptr_C = state_ptr_C + (n + l) * states_strides[2]
                kept_C = tl.load(ptr_C, mask=old_C & (row < 0), other=0.0)
                inputs_LC += (tl.where(row < 0, kept_C.to(ACC), new_C.to(ACC)),)
            else:
                inputs_LC += (new_C.to(ACC),)
        y_C = inputs_LC[0] * weights_LC[0].to(ACC)
        for l in tl.static_range(1, L):
            y_C += inputs_LC[l] * weights_LC[l].to(ACC)
        y_C += bias_C
        if SILU:
            y_C = silu(y_C, ACC)
        tl.store(out_ptr + (first + n) * C + c_C, y_C.to(out_ptr.dtype.element_ty), mask=inside_C)
        for l in tl.static_range(1, L):
            ptr_C = pool_ptr_C + (l - 1) * states_strides[2]
            keep_behind(first + n, kept_ptr, ptr_C, states_strides[0], inputs_LC[l], inside_C)
        if (n == length - 1) & (block == 0):
            tl.debug_barrier()  # an input moves to a place that another thread has read
            for l in tl.static_range(1, L):
                tl.store(
                    state_ptr_C + (l - 1) * states_strides[2],
                    inputs_LC[l].to(states_ptr.dtype.element_ty),
                    mask=inside_C,
                )
    if block == 0:
        if part < length:
            tl.debug_barrier()
            for l in tl.static_range(1, L):
                last_C = tl.load(x_ptr_C + (length + l - L) * x_strides[0], mask=inside_C)
                ptr_C = state_ptr_C + (l - 1) * states_strides[2]
                tl.store(ptr_C, last_C.to(states_ptr.dtype.element_ty), mask=inside_C)
        zero_rows(out_ptr + c_C, C, zero_first, zero_end, inside_C)


@triton.jit(do_not_specialize=["num_rows"])
def delta_rule_kernel(
    out_ptr,  # [T, H, V] contiguous
    q_ptr,  # [T, G, K]
    k_ptr,  # [T, G, K]
    v_ptr,  # [T, H, V]
    g_ptr,  # [T, H], or [T, H, K] with KEY_DECAY
    beta_ptr,  # [T, H]
    states_ptr,  # [P, H, K, V]
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    kept_ptr,  # [T] or None
    num_rows,  # T
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    beta_strides,
    states_strides,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # H / G
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,  # of q
    KEY_DECAY: tl.constexpr,
    NORMALIZED: tl.constexpr,
    LONG: tl.constexpr,  # rows of requests that other kernels compute
    ACC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(V / BLOCK_V), H, S). Columns of a state do not meet."""
    wait_for_inputs(PDL)
    slot, first, length, num_seen, zero_first, zero_end = request_rows(
        slots_ptr, starts_ptr, seq_lens_ptr, num_rows, LONG
    )
    head = tl.program_id(1)
    key_head = head // GROUP
    k_K = tl.arange(0, BLOCK_K)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_K, inside_V = k_K < K, v_V < V
    inside_KV = inside_K[:, None] & inside_V[None, :]
    pool_ptr_KV = states_ptr + head * states_strides[1]
    pool_ptr_KV += k_K[:, None] * states_strides[2] + v_V[None, :] * states_strides[3]
    state_ptr_KV = pool_ptr_KV + slot * states_strides[0]
    q_ptr_K = q_ptr + first * q_strides[0] + key_head * q_strides[1] + k_K * q_strides[2]
    k_ptr_K = k_ptr + first * k_strides[0] + key_head * k_strides[1] + k_K * k_strides[2]
    v_ptr_V = v_ptr + first * v_strides[0] + head * v_strides[1] + v_V * v_strides[2]
    g_ptr += first * g_strides[0] + head * g_strides[1]
    beta_ptr += first * beta_strides[0] + head * beta_strides[1]
    out_ptr_V = out_ptr + head * V + v_V
    if length > 0:
        mask_KV = inside_KV & (num_seen != 0)
        state_KV = tl.load(state_ptr_KV, mask=mask_KV, other=0.0).to(ACC)
        for n in range(0, length):
            q_K = tl.load(q_ptr_K + n * q_strides[0], mask=inside_K, other=0.0).to(ACC)
            key_K = tl.load(k_ptr_K + n * k_strides[0], mask=inside_K, other=0.0).to(ACC)
            value_V = tl.load(v_ptr_V + n * v_strides[0], mask=inside_V, other=0.0).to(ACC)
            beta = tl.load(beta_ptr + n * beta_strides[0]).to(ACC)
            if NORMALIZED:
                q_K *= tl.rsqrt(tl.sum(q_K * q_K) + 1e-6)
                key_K *= tl.rsqrt(tl.sum(key_K * key_K) + 1e-6)
            if KEY_DECAY:
                g_ptr_K = g_ptr + n * g_strides[0] + k_K * g_strides[2]
                decay_K = tl.exp(tl.load(g_ptr_K, mask=inside_K, other=0.0).to(ACC))
                state_KV *= decay_K[:, None]
            else:
                state_KV *= tl.exp(tl.load(g_ptr + n * g_strides[0]).to(ACC))
            change_V = (value_V - tl.sum(state_KV * key_K[:, None], axis=0)) * beta
            state_KV += key_K[:, None] * change_V[None, :]
            y_V = tl.sum(state_KV * (q_K * SCALE)[:, None], axis=0)
            tl.store(
                out_ptr_V + (first + n) * (H * V),
                y_V.to(out_ptr.dtype.element_ty),
                mask=inside_V,
            )
            keep_behind(first + n, kept_ptr, pool_ptr_KV, states_strides[0], state_KV, inside_KV)
        tl.store(state_ptr_KV, state_KV.to(states_ptr.dtype.element_ty), mask=inside_KV)
    zero_rows(out_ptr_V, H * V, zero_first, zero_end, inside_V)


@triton.jit(do_not_specialize=["num_rows"])
def ssd_kernel(
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
    num_rows,  # T
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
    SOFTPLUS: tl.constexpr,
    DT_MIN: tl.constexpr,  # in rows of prompts; None: no bound
    DT_MAX: tl.constexpr,
    LONG: tl.constexpr,  # rows of requests that other kernels compute
    ACC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(V / BLOCK_V), H, S). Rows of a state do not meet."""
    wait_for_inputs(PDL)
    slot, first, length, num_seen, zero_first, zero_end = request_rows(
        slots_ptr, starts_ptr, seq_lens_ptr, num_rows, LONG
    )
    head = tl.program_id(1)
    group = head // GROUP
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    n_N = tl.arange(0, BLOCK_N)
    inside_V, inside_N = v_V < V, n_N < N
    inside_VN = inside_V[:, None] & inside_N[None, :]
    pool_ptr_VN = states_ptr + head * states_strides[1]
    pool_ptr_VN += v_V[:, None] * states_strides[2] + n_N[None, :] * states_strides[3]
    state_ptr_VN = pool_ptr_VN + slot * states_strides[0]
    x_ptr_V = x_ptr + first * x_strides[0] + head * x_strides[1] + v_V * x_strides[2]
    B_ptr_N = B_ptr + first * B_strides[0] + group * B_strides[1] + n_N * B_strides[2]
    C_ptr_N = C_ptr + first * C_strides[0] + group * C_strides[1] + n_N * C_strides[2]
    dt_ptr += first * dt_strides[0] + head * dt_strides[1]
    out_ptr_V = out_ptr + head * V + v_V
    if length > 0:
        A = tl.load(A_ptr + head * A_strides[0]).to(ACC)
        if DT_MIN is not None or DT_MAX is not None:
            prompt_len_ptr = prompt_lens_ptr + tl.program_id(2) * prompt_lens_strides[0]
            num_prompt = tl.load(prompt_len_ptr).to(tl.int64) - num_seen  # rows of the prompt
        mask_VN = inside_VN & (num_seen != 0)
        state_VN = tl.load(state_ptr_VN, mask=mask_VN, other=0.0).to(ACC)
        for n in range(0, length):
            x_V = tl.load(x_ptr_V + n * x_strides[0], mask=inside_V, other=0.0).to(ACC)
            B_N = tl.load(B_ptr_N + n * B_strides[0], mask=inside_N, other=0.0).to(ACC)
            C_N = tl.load(C_ptr_N + n * C_strides[0], mask=inside_N, other=0.0).to(ACC)
            dt = tl.load(dt_ptr + n * dt_strides[0])
            bias_at = head * dt_bias_strides[0]
            dt = step_size(dt, dt_bias_ptr, bias_at, length > 0, SOFTPLUS, ACC)
            if DT_MIN is not None:
                dt = tl.where((n < num_prompt) & (dt < DT_MIN), tl.full((), DT_MIN, ACC), dt)
            if DT_MAX is not None:
                dt = tl.where((n < num_prompt) & (dt > DT_MAX), tl.full((), DT_MAX, ACC), dt)
            state_VN = state_VN * tl.exp(dt * A) + (dt * x_V)[:, None] * B_N[None, :]
            y_V = tl.sum(state_VN * C_N[None, :], axis=1)
            if D_ptr is not None:
                y_V += x_V * tl.load(D_ptr + head * D_strides[0]).to(ACC)
            tl.store(
                out_ptr_V + (first + n) * (H * V),
                y_V.to(out_ptr.dtype.element_ty),
                mask=inside_V,
            )
            keep_behind(first + n, kept_ptr, pool_ptr_VN, states_strides[0], state_VN, inside_VN)
        tl.store(state_ptr_VN, state_VN.to(states_ptr.dtype.element_ty), mask=inside_VN)
    zero_rows(out_ptr_V, H * V, zero_first, zero_end, inside_V)


@triton.jit(do_not_specialize=["num_rows"])
def selective_kernel(
    out_ptr,  # [T, C] contiguous
    x_ptr,  # [T, C]
    dt_ptr,  # [T, C]
    A_ptr,  # [C, N]
    B_ptr,  # [T, N]
    C_ptr,  # [T, N]
    D_ptr,  # [C] or None
    z_ptr,  # [T, C] or None
    dt_bias_ptr,  # [C] or None
    states_ptr,  # [P, C, N]
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    kept_ptr,  # [T] or None
    num_rows,  # T
    x_strides,
    dt_strides,
    A_strides,
    B_strides,
    C_strides,
    D_strides,
    z_strides,
    dt_bias_strides,
    states_strides,
    NUM_CHANNELS: tl.constexpr,  # C
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    ACC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(C / BLOCK_C), 1, S). Channels do not meet."""
    wait_for_inputs(PDL)
    slot, first, length, num_seen, zero_first, zero_end = request_rows(
        slots_ptr, starts_ptr, seq_lens_ptr, num_rows, None
    )
    c_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n_N = tl.arange(0, BLOCK_N)
    inside_C, inside_N = c_C < NUM_CHANNELS, n_N < N
    inside_CN = inside_C[:, None] & inside_N[None, :]
    pool_ptr_CN = states_ptr
    pool_ptr_CN += c_C[:, None] * states_strides[1] + n_N[None, :] * states_strides[2]
    state_ptr_CN = pool_ptr_CN + slot * states_strides[0]
    x_ptr_C = x_ptr + first * x_strides[0] + c_C * x_strides[1]
    dt_ptr_C = dt_ptr + first * dt_strides[0] + c_C * dt_strides[1]
    B_ptr_N = B_ptr + first * B_strides[0] + n_N * B_strides[1]
    C_ptr_N = C_ptr + first * C_strides[0] + n_N * C_strides[1]
    if length > 0:
        A_ptr_CN = A_ptr + c_C[:, None] * A_strides[0] + n_N[None, :] * A_strides[1]
        A_CN = tl.load(A_ptr_CN, mask=inside_CN, other=0.0).to(ACC)
        mask_CN = inside_CN & (num_seen != 0)
        state_CN = tl.load(state_ptr_CN, mask=mask_CN, other=0.0).to(ACC)
        for n in range(0, length):
            x_C = tl.load(x_ptr_C + n * x_strides[0], mask=inside_C, other=0.0).to(ACC)
            B_N = tl.load(B_ptr_N + n * B_strides[0], mask=inside_N, other=0.0).to(ACC)
            C_N = tl.load(C_ptr_N + n * C_strides[0], mask=inside_N, other=0.0).to(ACC)
            dt_C = tl.load(dt_ptr_C + n * dt_strides[0], mask=inside_C, other=0.0)
            bias_at_C = c_C * dt_bias_strides[0]
            dt_C = step_size(dt_C, dt_bias_ptr, bias_at_C, inside_C, SOFTPLUS, ACC)
            state_CN *= tl.exp(dt_C[:, None] * A_CN)
            state_CN += (dt_C * x_C)[:, None] * B_N[None, :]
            y_C = tl.sum(state_CN * C_N[None, :], axis=1)
            if D_ptr is not None:
                D_C = tl.load(D_ptr + c_C * D_strides[0], mask=inside_C, other=0.0)
                y_C += x_C * D_C.to(ACC)
            if z_ptr is not None:
                z_ptr_C = z_ptr + (first + n) * z_strides[0] + c_C * z_strides[1]
                y_C *= silu(tl.load(z_ptr_C, mask=inside_C, other=0.0).to(ACC), ACC)
            tl.store(
                out_ptr + (first + n) * NUM_CHANNELS + c_C,
                y_C.to(out_ptr.dtype.element_ty),
                mask=inside_C,
            )
            keep_behind(first + n, kept_ptr, pool_ptr_CN, states_strides[0], state_CN, inside_CN)
        tl.store(state_ptr_CN, state_CN.to(states_ptr.dtype.element_ty), mask=inside_CN)
    zero_rows(out_ptr + c_C, NUM_CHANNELS, zero_first, zero_end, inside_C)


# -- launches --------------------------------------------------------------------------------------


def launch_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """`causal_conv1d_update`."""
    channels, length = weight.shape
    tile = TILES["causal_conv1d"]
    block = min(tile.numbers, next_power_of_2(channels))
    packed = length in (2, 4) and weight.is_contiguous() and weight.data_ptr() % 8 == 0
    packed = packed and length * weight.itemsize == 8
    more_rows = x.shape[0] - batch[0].numel()  # than one a request: there is a prompt
    most = max(16, MOST_PARTS // max(1, batch[0].numel()))
    blocks = min(most, max(1, cdiv(more_rows, ROWS)))
    return _launch(
        causal_conv1d_kernel, x, (cdiv(channels, block), blocks), (x, weight, bias), states,
        batch, num_warps=tile.warps, C=channels, L=length, BLOCK_C=block, SILU=silu, PACKED=packed,
    )  # fmt: skip


def launch_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalized: bool,
    states: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """`gated_delta_rule`; `kda` where g has three dimensions."""
    heads, size = v.shape[1:]
    keys = q.shape[2]
    has_long = keys <= 128 and chunks.may_have_long(v, batch)
    tile = TILES["kda" if g.dim() == 3 else "gated_delta_rule"]
    padded, block = _tile(tile, keys, size)
    programs = (cdiv(size, block), heads)
    out = _launch(
        delta_rule_kernel, v, programs, (q, k, v, g, beta), states, batch, num_warps=tile.warps,
        H=heads, GROUP=heads // q.shape[1], K=keys, V=size, BLOCK_K=padded, BLOCK_V=block,
        SCALE=keys**-0.5, KEY_DECAY=g.dim() == 3, NORMALIZED=normalized,
        LONG=chunks.LONG if has_long else None,
    )  # fmt: skip
    if has_long:
        chunks.launch_delta_rule(out, q, k, v, g, beta, normalized, states, batch)
    return out


def launch_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    prompt_dt: tuple[float | None, float | None],
    prompt_lens: torch.Tensor | None,
    states: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """`ssd_state_update`."""
    limits = (None, None) if prompt_lens is None else prompt_dt
    tensors = (x, dt, A, B, C, D, dt_bias, prompt_lens)
    (heads, size), (groups, width) = x.shape[1:], B.shape[1:]
    has_long = width <= 256 and chunks.may_have_long(x, batch)
    tile = TILES["ssd"]
    padded, block = _tile(tile, width, size)
    out = _launch(
        ssd_kernel, x, (cdiv(size, block), heads), tensors, states, batch,
        num_warps=tile.warps,
        H=heads, GROUP=heads // groups, V=size, N=width, BLOCK_V=block, BLOCK_N=padded,
        SOFTPLUS=softplus, DT_MIN=limits[0], DT_MAX=limits[1],
        LONG=chunks.LONG if has_long else None,
    )  # fmt: skip
    if has_long:
        chunks.launch_ssd(out, *tensors, softplus, limits, states, batch)
    return out


def launch_selective(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    states: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """`selective_state_update`."""
    channels, width = A.shape
    tile = TILES["selective"]
    padded, block = _tile(tile, width, min(channels, 128))
    tensors, programs = (x, dt, A, B, C, D, z, dt_bias), (cdiv(channels, block), 1)
    return _launch(
        selective_kernel, x, programs, tensors, states, batch, num_warps=tile.warps,
        NUM_CHANNELS=channels, N=width, BLOCK_C=block, BLOCK_N=padded, SOFTPLUS=softplus,
    )  # fmt: skip


def _tile(tile: Tile, whole: int, part: int) -> tuple[int, int]:
    """Sizes of a tile that has one side of a state whole and as much of the other as fits."""
    padded = next_power_of_2(whole)
    return padded, min(next_power_of_2(part), max(1, tile.numbers // padded))


def _launch(
    kernel: Any,
    like: torch.Tensor,
    programs: tuple[int, int],
    tensors: Sequence[torch.Tensor | None],
    states: torch.Tensor,
    batch: Batch,
    **constants: Any,
) -> torch.Tensor:
    """What a kernel computes, of the shape and dtype of `like`.

    Args:
        programs: of each request.
        tensors: which the kernel takes with their strides.
        constants: of the kernel, beside those that all have.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    slots, starts, seq_lens, kept = (None if x is None else x.contiguous() for x in batch)
    assert slots is not None, "only kept may be None"
    if out.numel() == 0 or slots.numel() == 0:
        return out.zero_()
    strides = [(0,) if x is None else x.stride() for x in (*tensors, states)]
    accumulator = tl.float64 if like.dtype == torch.float64 else tl.float32
    with torch.cuda.device_of(out):  # Triton launches on the current device
        quick(kernel, (*programs, slots.numel()))(
            out, *tensors, states, slots, starts, seq_lens, kept, out.shape[0], *strides,
            ACC=accumulator, **constants, **early_launch(out.device),
        )  # fmt: skip
    return out
