"""TRITON: paged attention in two Triton kernels, for any batch and for single-token queries.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, cpu | fp16, bf16, fp32 | 8-256 by 8, 512 | 16-256 by 16 | yes | yes | always |

| FP8 cache | ALiBi | sinks | non-causal | log-sum-exp |
|---|---|---|---|---|
| e4m3 (from compute capability 8.9), e5m2 | yes | yes | yes | yes |

It writes quantized output itself: FP8 by a given scale, by groups that lie within a head and, in
decodes whose keys are split, by row; NVFP4.

Head sizes are padded to a power of two and take its tiles, which are tuned for 128 alone. On a cpu
the kernels run interpreted, for tests, and only with TRITON_INTERPRET=1. `prefill` takes any batch;
`decode` takes batches whose queries are single tokens and splits their keys. This file imports no
Triton: the first forward imports the kernels.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import functools
import importlib
import os
from collections.abc import Callable

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    kv_dtype_of,
)


class TritonMetadataBuilder(AttentionMetadataBuilder):
    """Nothing to plan: the kernels find their work in query_start_loc and seq_lens.

    A captured launch freezes num_reqs, max_seq_len and max_query_len. Both lengths must bound those
    of every replay: long prefills gather keys into scratch of max_seq_len rows a request, so that
    a longer request would lose its last keys.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H]; strides free but for contiguous heads.

    Raises:
        ValueError: the backend does not support the tensors, the window or the cap.
    """
    special = not options.checked or q.is_cpu or options.kv_cache_dtype != "auto"
    if special or q.stride(2) != 1 or kv_cache.stride(4) != 1:
        check(q, kv_cache, options)
    if q.shape[0] == 0:
        if options.quant is not None:
            return options.quant.out
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend = _kernels()[meta.common.max_query_len > 1]
    if q.device.type == "cpu" or q.get_device() == torch.cuda.current_device():
        return attend(q, kv_cache, meta.common, options)
    with torch.cuda.device_of(q):  # Triton launches on the current device, not on its arguments'
        return attend(q, kv_cache, meta.common, options)


# Cached: two imports in a function take 5 us a call (a CPU, 2026-11-22).
@functools.cache
def _kernels() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """The launchers of single-token queries and of any; imports Triton."""
    from attn_ops.backends.triton.decode import decode_attention
    from attn_ops.backends.triton.prefill import prefill_attention

    return decode_attention, prefill_attention


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """q [T, N, H], k and v [T, K, H] -> [T, N, H]: every request over its own rows.

    Raises:
        ValueError: see `forward`.
    """
    _check_interpreter(q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(2) != 1:
            raise ValueError(f"stride of {name}'s last dimension must be 1, got {x.stride(2)}")
    if q.shape[0] == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    from attn_ops.backends.triton.prefill import varlen_attention

    with torch.cuda.device_of(q):
        return varlen_attention(q, k, v, meta.common, options)


def _check_interpreter(q: torch.Tensor) -> None:
    if q.device.type == "cpu" and not _interpreted():
        raise ValueError(
            "device must be cuda unless TRITON_INTERPRET=1 is set, got cpu; supported: cuda"
        )


def check(q: torch.Tensor, kv_cache: torch.Tensor, options: AttentionOptions) -> None:
    """What this backend asks for beyond the shapes and devices that the operator has checked."""
    support, fp8 = BACKEND.support, options.kv_cache_dtype != "auto"
    _check_interpreter(q)
    for name, value, supported in (
        ("dtype of q", q.dtype, support.dtypes),
        ("dtype of kv_cache", kv_cache.dtype, (torch.uint8 if fp8 else q.dtype,)),
        ("head_size", q.shape[2], support.head_sizes),
        ("block_size", kv_cache.shape[2], support.block_sizes),
        ("stride of q's last dimension", q.stride(2), (1,)),
        ("stride of kv_cache's last dimension", kv_cache.stride(4), (1,)),
    ):
        if value not in supported:
            names = ", ".join(map(str, supported))
            raise ValueError(f"{name} must be supported, got {value}; supported: {names}")
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ValueError(f"sliding_window must be None or at least 1, got {options.sliding_window}")
    if options.soft_cap is not None and options.soft_cap <= 0:
        raise ValueError(f"soft_cap must be None or positive, got {options.soft_cap}")
    check_e4m3(options.kv_cache_dtype, q.device)


def check_e4m3(kv_cache_dtype: str, device: torch.device) -> None:
    """Raise a ValueError for a cache in E4M3 unless Triton converts that on `device`."""
    if kv_dtype_of(kv_cache_dtype) == torch.float8_e4m3fn and not converts_e4m3(device):
        raise ValueError(
            "kv_cache_dtype must be supported by the GPU, got fp8_e4m3 below compute capability "
            "8.9; supported: auto, fp8_e5m2"
        )


# Cached: a property of the device, asked by each launch.
@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether Triton compiles conversions from E4M3 for `device`."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _unavailable() -> str | None:
    # Triton reads TRITON_INTERPRET when it is imported, so it is not imported
    # before it can be of use.
    if not torch.cuda.is_available() and not _interpreted():
        return (
            "TRITON needs a CUDA device; on a CPU its kernels only run interpreted, "
            "with TRITON_INTERPRET=1"
        )
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton must be installed: {error}"
    return None


BACKEND = Backend(
    name="TRITON",
    support=Support(
        devices=("cuda", "cpu"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        head_sizes=(*range(8, 257, 8), 512),
        block_sizes=tuple(range(16, 257, 16)),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.ALWAYS,
        kv_cache_dtypes=tuple(KV_CACHE_DTYPES),
        alibi=True,
        sinks=True,
        non_causal=True,
        lse=True,
        # A step of 8 requests gains 0.9, 0.9 and 0.7 percent: 1.298 to 1.286 ms, 1.528 to 1.515,
        # 1.522 to 1.512 (one H200, 2026-11-23), the most of all schemes.
        # fp8_row gains nothing; NVFP4 and prompts were not measured in a step.
        output_quant=("fp8_static", "fp8_group128", "fp8_group64"),
    ),
    builder=TritonMetadataBuilder,
    forward=forward,
    unavailable=_unavailable,
    varlen=varlen,
)
