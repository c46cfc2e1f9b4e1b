"""`log_probs` in two kernels: one pass over the logits, then one over what its chunks found.

A number and its index become one integer that sorts as both do: a float's bits are monotonic once
those of negative ones are flipped, and the index comes below them, so that equal numbers keep
their order. R rows, V vocabulary, C chunks of a row, N logits of a chunk, K most likely of each.
"""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, wait_for_inputs
from attn_ops.integers import cdiv, next_power_of_2
from graphs.sampling.triton.race import load_logits

CHUNK = 2048
"""Logits of a program: 63 programs for a row of 128,256."""

NONE = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-(2**63))


@triton.jit
def sortable(x_N, index_N):
    bits_N = (x_N + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    ordered_N = bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)
    return (ordered_N.to(tl.int64) << 32) | (0x7FFFFFFF - index_N).to(tl.int64)


@triton.jit
def unsorted(key_N):
    ordered_N = (key_N >> 32).to(tl.int32)
    bits_N = ordered_N ^ ((ordered_N >> 31) & 0x7FFFFFFF)
    return bits_N.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key_N & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_logprobs_kernel(
    top_ptr,  # [R, C] float32: largest logit of a chunk
    sum_ptr,  # [R, C] float32: of exponentials, relative to it
    greater_ptr,  # [R, C] int32: logits above the token's
    key_ptr,  # [R, C, K] int64, if K
    logits_ptr,  # [R, V], contiguous in V
    token_ptr,  # [R] int64
    vocab_size,
    stride_R,
    num_chunks,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C)."""
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index_N = chunk * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + row * stride_R
    x_N = load_logits(row_ptr, index_N, vocab_size)
    x_N = tl.where(x_N == x_N, x_N, NONE)
    given = tl.load(row_ptr + tl.load(token_ptr + row)).to(tl.float32)
    given = tl.where(given == given, given, NONE)
    top = tl.max(x_N)
    base = tl.where(top == NONE, 0.0, top)
    place = row * num_chunks + chunk
    tl.store(top_ptr + place, top)
    tl.store(sum_ptr + place, tl.sum(tl.exp(x_N - base)))
    tl.store(greater_ptr + place, tl.sum((x_N > given).to(tl.int32)))
    if K:
        key_N = tl.where(index_N < vocab_size, sortable(x_N, index_N), LOWEST)
        tl.store(key_ptr + place * K + tl.arange(0, K), tl.topk(key_N, K))


@triton.jit(do_not_specialize=["num_chunks"])
def row_logprobs_kernel(
    value_ptr,  # [R, 1 + num_top] float32
    id_ptr,  # [R, 1 + num_top] int32
    rank_ptr,  # [R] int32
    top_ptr,  # as of `chunk_logprobs_kernel`
    sum_ptr,
    greater_ptr,
    key_ptr,
    logits_ptr,
    token_ptr,
    stride_R,
    num_chunks,
    num_top,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # C, padded to a power of two
    PDL: tl.constexpr,  # launched early
):
    """Grid (R,)."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, CHUNKS)
    inside_C = c_C < num_chunks
    place_C = row * num_chunks + c_C
    top_C = tl.load(top_ptr + place_C, mask=inside_C, other=NONE)
    sum_C = tl.load(sum_ptr + place_C, mask=inside_C, other=0.0)
    greater_C = tl.load(greater_ptr + place_C, mask=inside_C, other=0)
    top = tl.max(top_C)
    base = tl.where(top == NONE, 0.0, top)
    total = base + tl.log(tl.sum(sum_C * tl.exp(top_C - base)))
    token = tl.load(token_ptr + row)
    given = tl.load(logits_ptr + row * stride_R + token).to(tl.float32)
    given = tl.where(given == given, given, NONE)
    width = 1 + num_top
    tl.store(value_ptr + row * width, given - total)
    tl.store(id_ptr + row * width, token.to(tl.int32))
    tl.store(rank_ptr + row, 1 + tl.sum(greater_C))
    if K:
        k_N = tl.arange(0, CHUNKS * K)
        inside_N = k_N < num_chunks * K
        key_N = tl.load(key_ptr + row * num_chunks * K + k_N, mask=inside_N, other=LOWEST)
        k_K = tl.arange(0, K)
        x_K, index_K = unsorted(tl.topk(key_N, K))
        wanted_K = k_K < num_top
        tl.store(value_ptr + row * width + 1 + k_K, x_K - total, mask=wanted_K)
        tl.store(id_ptr + row * width + 1 + k_K, index_K, mask=wanted_K)


def launch_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernels of `log_probs`: values, ids and ranks, as of `LogProbs`."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    values_RK = torch.empty(num_rows, 1 + k, dtype=torch.float32, device=device)
    ids_RK = torch.empty(num_rows, 1 + k, dtype=torch.int32, device=device)
    ranks_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return values_RK, ids_RK, ranks_R
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = tokens.contiguous()
    num_chunks = cdiv(vocab_size, CHUNK)
    padded = max(8, next_power_of_2(k)) if k else 0
    top_RC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    sum_RC, greater_RC = torch.empty_like(top_RC), top_RC.new_empty(top_RC.shape, dtype=torch.int32)
    shape = (num_rows, num_chunks, max(padded, 1))
    key_RCK = torch.empty(shape, dtype=torch.int64, device=device)
    early = early_launch(device)
    with torch.cuda.device_of(logits):
        chunk_logprobs_kernel[(num_rows, num_chunks)](
            top_RC, sum_RC, greater_RC, key_RCK, logits, tokens, vocab_size, logits.stride(0),
            num_chunks, K=padded, CHUNK=CHUNK, **early,
        )  # fmt: skip
        row_logprobs_kernel[(num_rows,)](
            values_RK, ids_RK, ranks_R, top_RC, sum_RC, greater_RC, key_RCK, logits, tokens,
            logits.stride(0), num_chunks, k, K=padded, CHUNKS=next_power_of_2(num_chunks),
            **early,
        )  # fmt: skip
    return values_RK, ids_RK, ranks_R
