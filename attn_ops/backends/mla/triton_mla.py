"""TRITON_MLA: latent attention by our own Triton kernels, both ways.

| devices | dtypes | sizes | block sizes | KV cache | CUDA graph |
|---|---|---|---|---|---|
| cuda, cpu | fp16, bf16, fp32 | any | 16-256 | auto, e4m3 (from 8.9), e5m2 | uniform batches |

The decode way splits keys over programs; the kernel that merges their results multiplies by W_UV
and quantizes the output. Block sizes are powers of two. On a cpu the kernels run interpreted, for
tests, and only with TRITON_INTERPRET=1. This file imports no Triton: the first forward does.

T tokens, D rows of the decode way, N query heads, Lkv latent, R head size with RoPE.
"""

import functools
import importlib
from typing import Any

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.forward import mla_forward, plan_of
from attn_ops.backends.mla.kernels import MLAKernels
from attn_ops.backends.triton import BACKEND as TRITON
from attn_ops.backends.triton import check_e4m3
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
    LatentOptions,
    kv_dtype_of,
)

ABSORB_ROWS = 64
"""Rows up to which q goes through W_UK by our kernel; with more of them by a batched product of
torch. On one H200 (2026-11-23, `benchmarks.mla decode`) the whole operator took 11.6 for 12.8 us at
1 request x 1,024 tokens and 16 heads, 35.6 for 36.3 at 64 requests, 21.6 for 20.9 at 1 request and
64 heads."""


# Cached: imports in a function take microseconds a call.
@functools.cache
def _kernels() -> tuple[Any, Any, Any, Any]:
    """The launchers; imports Triton."""
    launchers = importlib.import_module("attn_ops.backends.mla.triton.decode")
    project = importlib.import_module("attn_ops.backends.mla.triton.project")
    prefill = importlib.import_module("attn_ops.backends.mla.triton.prefill")
    absorb = importlib.import_module("attn_ops.backends.mla.triton.absorb")
    return launchers.mla_decode, project.mla_decode_project, prefill.mla_prefill, absorb.absorb


def absorb(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """See `Absorb` in kernels.py."""
    if q_nope.shape[0] <= ABSORB_ROWS:
        return _kernels()[3](q_nope, w_uk)
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def _batch(part: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return part.block_table_tensor, part.seq_lens, part.query_start_loc


def decode(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    part: CommonAttentionMetadata,
    *,
    kv_cache_dtype: str,
    plan: object = None,
    **asked: Any,
) -> torch.Tensor:
    """See `Decode` in kernels.py."""
    return _kernels()[0](
        ql_nope, q_pe, kv_cache, *_batch(part), max_query_len=part.max_query_len,
        max_seq_len=part.max_seq_len, fp8=kv_dtype_of(kv_cache_dtype), **asked,
    )  # fmt: skip


def decode_project(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    part: CommonAttentionMetadata,
    w_uv: torch.Tensor,
    *,
    kv_cache_dtype: str,
    plan: object = None,
    **asked: Any,
) -> torch.Tensor:
    """See `DecodeProject` in kernels.py."""
    return _kernels()[1](
        ql_nope, q_pe, kv_cache, *_batch(part), w_uv, max_query_len=part.max_query_len,
        max_seq_len=part.max_seq_len, fp8=kv_dtype_of(kv_cache_dtype), **asked,
    )  # fmt: skip


def prefill(*tensors: Any, **asked: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `Prefill` in kernels.py."""
    return _kernels()[2](*tensors, **asked)


KERNELS = MLAKernels(decode, prefill, decode_project, absorb)


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: LatentOptions,
    plan: Any = None,
) -> torch.Tensor:
    """`mla_forward` with these kernels, on q's device.

    Raises:
        ValueError: the backend does not support the tensors.
    """
    _check(q, kv_cache, options)
    if q.shape[0] == 0:
        return q.new_empty(*q.shape[:2], options.v_head_dim)
    if q.device.type == "cpu" or q.get_device() == torch.cuda.current_device():
        return mla_forward(KERNELS, q, kv_cache, meta, options, plan)
    with torch.cuda.device_of(q):  # Triton launches on the current device, not on its arguments'
        return mla_forward(KERNELS, q, kv_cache, meta, options, plan)


def _check(q: torch.Tensor, kv_cache: torch.Tensor, options: LatentOptions) -> None:
    """What this backend asks for beyond what the operator has checked."""
    for name, x in (("q", q), ("kv_cache", kv_cache), ("kv_b", options.kv_b)):
        if x.stride(-1) != 1:
            raise ValueError(f"stride of {name}'s last dimension must be 1, got {x.stride(-1)}")
    check_e4m3(options.kv_cache_dtype, q.device)


BACKEND = Backend(
    name="TRITON_MLA",
    support=Support(
        devices=TRITON.support.devices,
        dtypes=TRITON.support.dtypes,
        block_sizes=(16, 32, 64, 128, 256),
        kv_cache_dtypes=TRITON.support.kv_cache_dtypes,
        cudagraph=AttentionCGSupport.UNIFORM_BATCH,
        lse=True,
        latent=True,
    ),
    builder=MLAMetadataBuilder,
    forward=forward,
    unavailable=TRITON.unavailable,
    plan_of=plan_of,
)
