"""What both attention kernels share: the state before the first key, options, the device's size.

M rows of a program.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.backends.base import AttentionOptions
from attn_ops.integers import next_power_of_2
from attn_ops.metadata import kv_dtype_of

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))

MAX_SPLITS = 64
"""Ranges of keys of one request: the combining kernel of `prefill` holds all parts of a row in
registers, and that of `decode` takes longer to merge more than it saves."""


# Cached: a property of the device, asked by each launch.
@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of `device`; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded_head_size(head_size: int) -> int:
    """Columns of a tile: a power of two, at least the 16 that tensor cores multiply."""
    return max(16, next_power_of_2(head_size))


@triton.jit
def first_logits(sinks_ptr, head_M, counted_M, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """max_M and sum_M, base 2, before the first key: nothing, or the sinks of counted_M.

    A row of a request without keys must not be counted: its sink would pass for a key.
    """
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink_M = tl.load(sinks_ptr + head_M, mask=counted_M, other=float("-inf"))
        max_M = sink_M.to(tl.float32) * LOG2_E
        sum_M = tl.where(counted_M, 1.0, 0.0)
    return max_M, sum_M


def score_constants(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(score_scale, soft_cap) as the key loops read them.

    Exponentials are base 2, and tanh(x) is 1 - 2 / (exp2(2 x log2 e) + 1).
    """
    log2_e = LOG2_E.value
    if soft_cap is None:
        return scale * log2_e, 0.0
    return 2.0 * log2_e * scale / soft_cap, soft_cap * log2_e


def option_arguments(
    options: AttentionOptions, unused: torch.Tensor
) -> tuple[tuple[float | int | torch.Tensor, ...], dict[str, Any]]:
    """The kernels' arguments from `score_scale` to `lse_ptr`, and the flags: which are read.

    `unused` stands for tensors that the layer does not have.
    """
    fp8 = kv_dtype_of(options.kv_cache_dtype) is not None
    tensors = {
        "HAS_ALIBI": options.alibi_slopes,
        "HAS_SINKS": options.sinks,
        "HAS_K_SCALE": options.k_scale if fp8 else None,
        "HAS_V_SCALE": options.v_scale if fp8 else None,
        "HAS_LSE": options.lse,
    }
    flags: dict[str, Any] = {name: tensor is not None for name, tensor in tensors.items()}
    flags["HAS_WINDOW"] = options.sliding_window is not None
    flags["HAS_SOFT_CAP"] = options.soft_cap is not None
    pointers = (unused if tensor is None else tensor for tensor in tensors.values())
    constants = score_constants(options.scale, options.soft_cap)
    return (*constants, options.sliding_window or 0, *pointers), flags


def readable(kv_cache: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """The cache as a kernel loads it: uint8 storage becomes a view of FP8."""
    fp8 = kv_dtype_of(options.kv_cache_dtype)
    return kv_cache if fp8 is None else kv_cache.view(fp8)


def widened(dtype: torch.dtype) -> bool:
    """Whether products must be float32: the interpreter multiplies bfloat16 as stored integers."""
    return dtype == torch.bfloat16 and knobs.runtime.interpret
