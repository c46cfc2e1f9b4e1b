"""The race of `graphs.sampling.race` over rows of any vocabulary, in one pass over the logits.

The integers are those of `philox.words`. The float32 operations are the same and are not fused, but
logarithms may differ in their last bits. A program computes from its row alone.

R rows, V vocabulary, C chunks of a row, N counters of a chunk.
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
from graphs.sampling.philox import LANES
from graphs.sampling.race import LEAST_TEMPERATURE

COUNTERS = 512
"""Counters of one program, of four indices each: 63 programs a row of 128,256."""

FEW_ROWS, FEW_ROWS_CHUNK, MANY_ROWS_CHUNK = 8, 1024, 4096
"""Logits of a program that finds the largest: 126 programs for a row of 128,256. Not measured."""

NONE = tl.constexpr(float("-inf"))
FAR = tl.constexpr(0x7FFFFFFF)
TWO_M32 = tl.constexpr(2.0**-32)
TWO_M7 = tl.constexpr(2.0**-7)
ONE_LESS = tl.constexpr(1 - 2.0**-24)
THIRD = tl.constexpr(1 / 3)


@triton.jit
def score(x_N, word_N, temperature):
    """`philox.gumbel` added to logits; NaN becomes -inf."""
    v_N = tl.minimum((word_N.to(tl.float32) + 0.5) * TWO_M32, ONE_LESS)
    series_N = v_N * (1.0 + v_N * (0.5 + v_N * (THIRD + v_N * 0.25)))
    e_N = tl.where(v_N < TWO_M7, series_N, -tl.log(1.0 - v_N))
    return tl.div_rn(x_N, temperature + tl.zeros_like(x_N)) - tl.log(e_N)


@triton.jit
def load_logits(ptr, index_N, vocab_size):
    return tl.load(ptr + index_N, mask=index_N < vocab_size, other=NONE).to(tl.float32)


@triton.jit
def first_of(score_N, index_N, best):
    return tl.min(tl.where(score_N == best, index_N, FAR))


@triton.jit(do_not_specialize=["num_chunks"])
def race_kernel(
    best_ptr,  # [R, C] float32
    index_ptr,  # [R, C] int32
    logits_ptr,  # [R, V], contiguous in V
    temperature_ptr,  # [R] float32
    seed_ptr,  # [R] int64
    position_ptr,  # [R] int64
    vocab_size,
    stride_R,
    num_chunks,
    LEAST: tl.constexpr,  # temperature
    LANES: tl.constexpr,
    COUNTERS: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C): the best score of a chunk and its first index."""
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_N = chunk * COUNTERS + tl.arange(0, COUNTERS)
    index_N = n_N // LANES * (4 * LANES) + n_N % LANES
    row_ptr = logits_ptr + row * stride_R
    x0_N = load_logits(row_ptr, index_N, vocab_size)
    x1_N = load_logits(row_ptr, index_N + LANES, vocab_size)
    x2_N = load_logits(row_ptr, index_N + 2 * LANES, vocab_size)
    x3_N = load_logits(row_ptr, index_N + 3 * LANES, vocab_size)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        low = (position & 0xFFFFFFFF).to(tl.uint32)
        high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        zero_N = tl.zeros([COUNTERS], tl.uint32)
        word0_N, word1_N, word2_N, word3_N = tl.philox(
            seed, n_N.to(tl.uint32), zero_N, zero_N + low, zero_N + high
        )
        temperature = tl.maximum(temperature, LEAST)
        x0_N = score(x0_N, word0_N, temperature)
        x1_N = score(x1_N, word1_N, temperature)
        x2_N = score(x2_N, word2_N, temperature)
        x3_N = score(x3_N, word3_N, temperature)
    x0_N, x1_N = tl.where(x0_N == x0_N, x0_N, NONE), tl.where(x1_N == x1_N, x1_N, NONE)
    x2_N, x3_N = tl.where(x2_N == x2_N, x2_N, NONE), tl.where(x3_N == x3_N, x3_N, NONE)
    best = tl.max(tl.maximum(tl.maximum(x0_N, x1_N), tl.maximum(x2_N, x3_N)))
    first = tl.minimum(first_of(x0_N, index_N, best), first_of(x1_N, index_N + LANES, best))
    first = tl.minimum(first, first_of(x2_N, index_N + 2 * LANES, best))
    first = tl.minimum(first, first_of(x3_N, index_N + 3 * LANES, best))
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(index_ptr + row * num_chunks + chunk, first)


@triton.jit(do_not_specialize=["num_chunks"])
def argmax_kernel(
    best_ptr,  # [R, C] float32
    index_ptr,  # [R, C] int32
    logits_ptr,  # [R, V], contiguous in V
    vocab_size,
    stride_R,
    num_chunks,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C): the largest of a chunk and its first index; NaN counts as -inf."""
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index_N = chunk * CHUNK + tl.arange(0, CHUNK)
    x_N = load_logits(logits_ptr + row * stride_R, index_N, vocab_size)
    x_N = tl.where(x_N == x_N, x_N, NONE)
    best = tl.max(x_N)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(index_ptr + row * num_chunks + chunk, first_of(x_N, index_N, best))


@triton.jit(do_not_specialize=["num_chunks"])
def finish_kernel(
    token_ptr,  # [R] int64
    best_ptr,  # [R, C] float32
    index_ptr,  # [R, C] int32
    num_chunks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R,): the first index of the row's best score."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk_C = tl.arange(0, BLOCK)
    inside_C = chunk_C < num_chunks
    best_C = tl.load(best_ptr + row * num_chunks + chunk_C, mask=inside_C, other=NONE)
    index_C = tl.load(index_ptr + row * num_chunks + chunk_C, mask=inside_C, other=FAR)
    tl.store(token_ptr + row, first_of(best_C, index_C, tl.max(best_C)).to(tl.int64))


def _tokens(num_rows: int, device: torch.device) -> torch.Tensor:
    make = torch.zeros if is_rehearsal() else torch.empty  # others index by them
    return make(num_rows, dtype=torch.int64, device=device)


def launch_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row [R, V], as [R] int64; the first of equal ones."""
    num_rows, vocab_size = logits.shape
    token_R = _tokens(num_rows, logits.device)
    if num_rows == 0:
        return token_R
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chunk = FEW_ROWS_CHUNK if num_rows <= FEW_ROWS else MANY_ROWS_CHUNK
    num_chunks = -(-vocab_size // chunk)
    best_RC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    index_RC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    early = early_launch(logits.device)
    block = next_power_of_2(num_chunks)
    with torch.cuda.device_of(logits):
        quick(argmax_kernel, (num_rows, num_chunks))(
            best_RC, index_RC, logits, vocab_size, logits.stride(0), num_chunks, CHUNK=chunk,
            **early,
        )  # fmt: skip
        quick(finish_kernel, (num_rows,))(
            token_R, best_RC, index_RC, num_chunks, BLOCK=block, **early
        )
    return token_R


def launch_race(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The kernels of `reference_race`, which documents arguments and result."""
    num_rows, vocab_size = logits.shape
    token_R = _tokens(num_rows, logits.device)
    if num_rows == 0:
        return token_R
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperatures, seeds, positions = (x.contiguous() for x in (temperatures, seeds, positions))
    num_chunks = -(-vocab_size // (4 * COUNTERS))
    best_RC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    index_RC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    early = early_launch(logits.device)
    with torch.cuda.device_of(logits):
        quick(race_kernel, (num_rows, num_chunks))(
            best_RC,
            index_RC,
            logits,
            temperatures,
            seeds,
            positions,
            vocab_size,
            logits.stride(0),
            num_chunks,
            LEAST=LEAST_TEMPERATURE,
            LANES=LANES,
            COUNTERS=COUNTERS,
            enable_fp_fusion=False,  # pyright: ignore[reportCallIssue]
            **early,
        )
        quick(finish_kernel, (num_rows,))(
            token_R,
            best_RC,
            index_RC,
            num_chunks,
            BLOCK=next_power_of_2(num_chunks),
            **early,
        )
    return token_R
