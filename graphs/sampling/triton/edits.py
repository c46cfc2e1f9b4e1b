"""`reference_allowed` as a kernel: one pass over the logits. R rows, V vocabulary, W words."""

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, wait_for_inputs
from attn_ops.integers import cdiv
from graphs.sampling.triton.race import load_logits

CHUNK = 2048
"""Logits of a program."""


@triton.jit
def allowed_kernel(
    out_ptr,  # [R, V] float32, contiguous
    logits_ptr,  # [R, V], contiguous in V
    allowed_ptr,  # [R, W] int32, contiguous
    vocab_size,
    num_words,
    stride_R,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,  # launched early
):
    """Grid (R, C)."""
    wait_for_inputs(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index_N = chunk * CHUNK + tl.arange(0, CHUNK)
    inside_N = index_N < vocab_size
    x_N = load_logits(logits_ptr + row * stride_R, index_N, vocab_size)
    word_N = tl.load(allowed_ptr + row * num_words + index_N // 32, mask=inside_N, other=0)
    bit_N = (word_N >> (index_N % 32)) & 1
    out_N = tl.where(bit_N == 1, x_N, float("-inf"))
    tl.store(out_ptr + row * vocab_size + index_N, out_N, mask=inside_N)


def launch_allowed(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """See `reference_allowed`."""
    num_rows, vocab_size = logits.shape
    out_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out_RV
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    grid = (num_rows, cdiv(vocab_size, CHUNK))
    with torch.cuda.device_of(logits):
        allowed_kernel[grid](
            out_RV, logits, allowed.contiguous(), vocab_size, allowed.shape[1], logits.stride(0),
            CHUNK=CHUNK, **early_launch(logits.device),
        )  # fmt: skip
    return out_RV
