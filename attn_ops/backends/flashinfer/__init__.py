"""FLASHINFER: FlashInfer's paged decode and prefill wrappers, planned on the host once a step.

| devices | dtypes | head sizes | block sizes | KV cache | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|---|
| cuda, sm_80+ | fp16, bf16 | 64, 128, 256 | 16 to 256 | auto, FP8 | yes | yes | decode |

Single-token queries in front of the batch go to the decode wrapper, the rest to the prefill
wrapper: FA3 kernels on sm_90, FA2 elsewhere and over FP8 caches. `parts` finds which request goes
where, `wrappers` holds FlashInfer's objects, `captured` those of CUDA graphs, `builder` makes a
step's plans and `forward` runs them. FlashInfer is imported when the first batch is planned, and
compiles its kernels then unless `flashinfer-jit-cache` holds them.

A captured step is planned on the host before every replay (`captured`). Batches may be non-causal,
but not with a window: FlashInfer's is to the left only.
"""

import functools
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.flashinfer.builder import FlashInferMetadataBuilder
from attn_ops.backends.flashinfer.forward import forward, plan_of
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionCGSupport

OLDEST = (0, 6, 8)
"""The version whose sources this is written against; `run(q_scale=)` must reach both wrappers."""


# Cached: to find a package and its version takes 2.8 ms (a CPU, 2026-11-22); each selection asks.
@functools.cache
def unavailable() -> str | None:
    """Asks for the package without importing it: the import takes seconds."""
    if not torch.cuda.is_available():
        return "a CUDA device must be present, got none"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU must be sm_80 or later, got {torch.cuda.get_device_name()}"
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        installed = None
    if installed is None or importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python must be installed, got none"
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"flashinfer-python must be {oldest} or later, got {installed}"
    return None


BACKEND = Backend(
    name="FLASHINFER",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=(64, 128, 256),
        block_sizes=(16, 32, 64, 128, 256),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        kv_cache_dtypes=tuple(KV_CACHE_DTYPES),
        non_causal=True,
        non_causal_window=False,
        lse=True,
    ),
    builder=FlashInferMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
    plan_of=plan_of,
)
