"""FLASH_ATTN: FlashAttention over the paged cache, by the first library found of `LIBRARIES`.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, sm_80+ | float16, bfloat16 | 64, 96, 128, 192, 256 | 16, 32, 64 | yes | yes | always |

With vLLM's builds also sinks, which FA3 reads as bfloat16, non-causal batches and the log-sum-exp,
and with their FA3 caches in E4M3; without a cache (`varlen`) the upstream libraries too.

Blocks of 128 and 256 tokens are left out: FA3 loads them whole, and a NaN behind a request's last
token comes out (vllm 0.24's FA3 on an H200, 2026-11-20, tests/gpu/attn_ops/test_backends.py).

FA3 multiplies FP8 by FP8: over an E4M3 cache q is rounded to E4M3 (`triton.quantize`), and the
kernel rounds the softmax's weights too. Batches of single tokens have a scale for each request and
kv head, all others one for the batch. The kernel's output is bfloat16.

On sm_90 the kernels are FA3, whose tile scheduler needs a plan: it is computed once per step
and layer geometry by `get_scheduler_metadata`, on the device, so that a captured step
computes it anew at every replay.

T tokens, S requests, N query heads, K kv heads, H head size, V head size of values, P blocks,
B block size.
"""

import math
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.backends.finite import finite_values
from attn_ops.backends.flash_attn.library import (
    LIBRARIES,
    check_fp8,
    fa_version,
    find_library,
    found_library,
    has_ragged_upstream,
    reasons_of_library,
    unavailable,
    upstream_forward,
    upstream_varlen,
    varlen_function,
    window_sizes,
)
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
)

__all__ = ["BACKEND", "LIBRARIES", "fa_version", "find_library", "unavailable"]

_SINKS_REFUSED = "sinks must be None with {}, got a tensor; supported with: " + ", ".join(
    LIBRARIES[:2]
)


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Plans FA3's tile scheduler: [num_scheduler_words] int32 per geometry.

    None where the kernels plan themselves.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> torch.Tensor | None:
        if spec.kv_cache_dtype != "auto":
            check_fp8()
        if fa_version() != 3 or common.num_reqs == 0:
            return None
        return found_library()[1].get_scheduler_metadata(
            batch_size=common.num_reqs,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=spec.num_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_size,
            cache_seqlens=common.seq_lens,
            qkv_dtype=spec.dtype if spec.kv_cache_dtype == "auto" else torch.float8_e4m3fn,
            cu_seqlens_q=common.query_start_loc,
            page_size=self.block_size,
            causal=common.causal,
            window_size=window_sizes(spec.sliding_window, common.causal),
            has_softcap=spec.soft_cap is not None,
        )


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    plan: dict[str, Any] | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H]; `plan` is what `plan_of` gives.

    Raises:
        ValueError: the library has no kernels for the options.
    """
    common, fp8 = meta.common, options.kv_cache_dtype != "auto"
    rows = common.num_actual_tokens
    if options.lse is not None:
        options.lse.fill_(-math.inf)
    if plan is None:
        plan = plan_of(meta, options.spec(q, kv_cache, common.causal))
    if 0 < rows == q.shape[0] and not fp8 and fa_version() == 3:
        # FA3 makes the same tensor in less of the host's time.
        return _run(q, kv_cache, meta, options, None, plan)
    out_TNH = torch.empty_like(q, memory_format=torch.contiguous_format)
    if rows < q.shape[0]:
        out_TNH[rows:].zero_()
    if rows == 0:
        return out_TNH
    if fp8:
        check_fp8()
        return _forward_fp8(q, kv_cache, meta, options, out_TNH, plan)
    if fa_version() is None:
        _refuse_sinks(options)
        return upstream_forward(q, kv_cache, common, options, out_TNH)
    return _run(q, kv_cache, meta, options, out_TNH, plan)


def _forward_fp8(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    out_TNH: torch.Tensor,
    plan: dict[str, Any],
) -> torch.Tensor:
    """kv_cache [P, 2, B, K, H] uint8: E4M3 of what it stands for over the scales."""
    from attn_ops.backends.flash_attn.triton.quantize import quantize_query, quantize_tokens

    common = meta.common
    rows, shape_SK = common.num_actual_tokens, (common.num_reqs, kv_cache.shape[3])
    if common.max_query_len <= 1:
        q_fp8, q_scale = quantize_tokens(q, common.query_start_loc, shape_SK[1])
    else:
        q_fp8, q_scale = quantize_query(q, rows)
    scales = {"q_descale": q_scale, "k_descale": options.k_scale, "v_descale": options.v_scale}
    descales = {n: s if s is None else s.expand(shape_SK) for n, s in scales.items()}
    # FA3 gives bfloat16 for FP8 whatever the model computes in.
    result = out_TNH if q.dtype == torch.bfloat16 else torch.empty_like(q_fp8, dtype=torch.bfloat16)
    _run(q_fp8, kv_cache.view(torch.float8_e4m3fn), meta, options, result, plan | descales)
    if result is not out_TNH:
        out_TNH[:rows] = result[:rows]
    return out_TNH


def _run(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    out_TNH: torch.Tensor | None,  # None: FA3 makes it
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Launch a kernel of the vLLM build, and bring its log-sum-exp into our order."""
    common = meta.common
    k_PBKH, v_PBKH = kv_cache.unbind(1)
    result = varlen_function()(
        q=q,
        k=k_PBKH,
        v=v_PBKH,
        out=out_TNH,
        max_seqlen_q=common.max_query_len,
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_k=common.max_seq_len,
        seqused_k=common.seq_lens,
        block_table=common.block_table_tensor,
        return_softmax_lse=options.lse is not None,
        softmax_scale=options.scale,
        s_aux=_sinks(options),
        **arguments,
    )
    if options.lse is None:
        return result
    rows = common.num_actual_tokens
    lse_TN = result[1][:, :rows].transpose(0, 1)
    if fa_version() == 2:  # +inf where a row sees no key, its output 0, and where it is NaN
        empty_TN = (lse_TN == math.inf) & (result[0][:rows, :, 0] == 0)
        lse_TN = lse_TN.masked_fill(empty_TN, -math.inf)
    options.lse[:rows] = lse_TN
    return result[0]


def _sinks(options: AttentionOptions) -> torch.Tensor | None:
    """The kernel reads them as bfloat16 whatever q is."""
    return None if options.sinks is None else options.sinks.to(torch.bfloat16)


def _refuse_sinks(options: AttentionOptions) -> None:
    """They are written for the vLLM builds alone."""
    if options.sinks is not None:
        raise ValueError(_SINKS_REFUSED.format(found_library()[0]))


def _geometry_arguments(
    common: CommonAttentionMetadata, sliding_window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    """Keywords that layers of one geometry share, with and without a cache."""
    return {
        "causal": common.causal,
        "window_size": window_sizes(sliding_window, common.causal),
        "softcap": soft_cap or 0.0,
        "fa_version": fa_version(),
    }


def plan_of(meta: AttentionMetadata, spec: AttentionSpec) -> dict[str, Any]:
    """The geometry's keywords of the kernel, and the step's plan for its tile scheduler.

    With these kept and FA3's own output `forward` without the library's function takes 5.5 us of a
    CPU host, 7.2 us where every call makes them (2026-11-21).
    """
    arguments = _geometry_arguments(meta.common, spec.sliding_window, spec.soft_cap)
    return arguments | {"scheduler_metadata": meta.planned(spec)}


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """q [T, N, H], k [T, K, H], v [T, K, H] -> [T, N, H]; each request over its own rows.

    Raises:
        ValueError: the library has no kernels for the options.
    """
    common = meta.common
    rows = common.num_actual_tokens
    out_TNH = q.new_empty((*q.shape[:2], v.shape[2]))
    if rows < q.shape[0]:
        out_TNH[rows:].zero_()
    if rows == 0:
        return out_TNH
    # The kernels load whole tiles of keys, of the next requests and of the padding rows too.
    k, v = k[:rows], v[:rows]
    if common.num_reqs > 1:
        k, v = finite_values(k, v)
    if fa_version() is None:
        _refuse_sinks(options)
        return upstream_varlen(q, k, v, common, options, out_TNH)
    varlen_function()(
        q=q,
        k=k,
        v=v,
        out=out_TNH,
        max_seqlen_q=common.max_query_len,
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_k=common.max_query_len,
        cu_seqlens_k=common.query_start_loc,
        softmax_scale=options.scale,
        s_aux=_sinks(options),
        **_geometry_arguments(common, options.sliding_window, options.soft_cap),
    )
    return out_TNH


class FlashAttentionBackend(Backend):
    """What depends on the library that is there, `Support` cannot know."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        if reasons:
            return reasons
        reasons = reasons_of_library(spec)
        if spec.sinks and has_ragged_upstream():
            reasons.insert(0, _SINKS_REFUSED.format(found_library()[0]))
        return reasons


BACKEND = FlashAttentionBackend(
    name="FLASH_ATTN",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=(64, 96, 128, 192, 256),
        block_sizes=(16, 32, 64),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.ALWAYS,
        kv_cache_dtypes=("auto", "fp8_e4m3"),
        sinks=True,
        non_causal=True,
        lse=True,
        quantizes_query=True,
    ),
    builder=FlashAttentionMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
    varlen=varlen,
    plan_of=plan_of,
)
