"""FLASH_ATTN: FlashAttention over the paged cache, by the first library found of `LIBRARIES`.

| devices | dtypes | head sizes | block sizes | window | soft cap | CUDA graph |
|---|---|---|---|---|---|---|
| cuda, sm_80+ | float16, bfloat16 | 64, 96, 128, 192, 256 | 16, 32, 64 | yes | yes | always |

Also sinks, which FA3 reads as bfloat16, non-causal batches and the log-sum-exp, with vLLM's builds.

Blocks of 128 and 256 tokens are left out: FA3 loads them whole, and a NaN behind a request's last
token comes out (vllm 0.24's FA3 on an H200, 2026-11-20, tests/gpu/test_backends.py).

On sm_90 the kernels are FA3, whose tile scheduler needs a plan: it is computed once per step
and layer geometry by `get_scheduler_metadata`, on the device, so that a captured step
computes it anew at every replay.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import functools
import importlib
from types import ModuleType

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
)

LIBRARIES = ("vllm.vllm_flash_attn", "vllm_flash_attn", "flash_attn_interface", "flash_attn")
"""The vLLM builds come first: they carry FA2 and FA3 with a paged cache of small blocks."""


@functools.cache
def find_library() -> tuple[str, ModuleType] | None:
    """The first of `LIBRARIES` that imports and has a varlen function, or None."""
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "flash_attn_varlen_func"):
            return name, module
    return None


@functools.cache
def fa_version() -> int | None:
    """3 or 2, whichever the vLLM build supports on this device; None for an upstream build."""
    found = find_library()
    if found is None or not hasattr(found[1], "is_fa_version_supported"):
        return None
    return next((version for version in (3, 2) if found[1].is_fa_version_supported(version)), None)


@functools.cache
def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "a CUDA device must be present, got none"
    found = find_library()
    if found is None:
        names = ", ".join(LIBRARIES)
        return f"a FlashAttention library must be installed, got none; supported: {names}"
    if fa_version() is None and not hasattr(found[1], "flash_attn_with_kvcache"):
        gpu = torch.cuda.get_device_name()
        return f"{found[0]} must have kernels for this GPU, got none for {gpu}"
    return None


def _library() -> tuple[str, ModuleType]:
    found = find_library()
    assert found is not None, "FLASH_ATTN is selected only where a library was found"
    return found


def _window(window: int | None, causal: bool) -> tuple[int, int]:
    """FlashAttention counts the keys to the left and right of the query's own; -1 is no limit."""
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else window - 1


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Plans FA3's tile scheduler: [num_scheduler_words] int32 per geometry.

    None where the kernels plan themselves.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> torch.Tensor | None:
        if fa_version() != 3 or common.num_reqs == 0:
            return None
        return _library()[1].get_scheduler_metadata(
            batch_size=common.num_reqs,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=spec.num_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_size,
            cache_seqlens=common.seq_lens,
            qkv_dtype=spec.dtype,
            cu_seqlens_q=common.query_start_loc,
            page_size=self.block_size,
            causal=common.causal,
            window_size=_window(spec.sliding_window, common.causal),
            has_softcap=spec.soft_cap is not None,
        )


def forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    common = meta.common
    out_TNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if options.lse is not None:
        options.lse.fill_(float("-inf"))
    if common.num_actual_tokens < q.shape[0]:
        out_TNH[common.num_actual_tokens :].zero_()
    if common.num_actual_tokens == 0:
        return out_TNH
    arguments = {
        "softmax_scale": options.scale,
        "causal": common.causal,
        "window_size": _window(options.sliding_window, common.causal),
        "softcap": options.soft_cap or 0.0,
    }
    if fa_version() is None:
        _refuse_upstream(options)
        return _upstream(q, kv_cache, common, out_TNH, arguments)
    spec = options.spec(q, kv_cache, common.causal)
    result = _library()[1].flash_attn_varlen_func(
        q=q,
        k=kv_cache[:, 0],
        v=kv_cache[:, 1],
        out=out_TNH,
        max_seqlen_q=common.max_query_len,
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_k=common.max_seq_len,
        seqused_k=common.seq_lens,
        block_table=common.block_table_tensor,
        scheduler_metadata=meta.plans.get(spec),
        fa_version=fa_version(),
        return_softmax_lse=options.lse is not None,
        # The kernel reads sinks as bfloat16 whatever q is.
        s_aux=None if options.sinks is None else options.sinks.to(torch.bfloat16),
        **arguments,
    )
    if options.lse is not None:
        rows = common.num_actual_tokens
        options.lse[:rows] = result[1][:, :rows].transpose(0, 1)
    return out_TNH


def _refuse_upstream(options: AttentionOptions) -> None:
    """Options that are written for the vLLM builds alone."""
    for name in ("sinks", "lse"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{name} must be None with {_library()[0]}, got a tensor; supported with: "
                f"{', '.join(LIBRARIES[:2])}"
            )


def _upstream(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    out_TNH: torch.Tensor,
    arguments: dict,
) -> torch.Tensor:
    """Upstream FA3 (`flash_attn_interface`), whose paged entry point is the KV-cache function.

    Upstream FA2 has no ragged queries over a paged cache of small blocks, so it is refused.
    """
    name, library = _library()
    if name != "flash_attn_interface":
        raise ValueError(
            f"FLASH_ATTN library must have ragged paged attention, got {name}; "
            f"supported: {LIBRARIES[:3]}"
        )
    rows = common.num_actual_tokens
    out_TNH[:rows] = library.flash_attn_with_kvcache(
        q[:rows],
        kv_cache[:, 0],
        kv_cache[:, 1],
        cache_seqlens=common.seq_lens,
        page_table=common.block_table_tensor,
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_q=common.max_query_len,
        **arguments,
    )
    return out_TNH


BACKEND = Backend(
    name="FLASH_ATTN",
    support=Support(
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_sizes=(64, 96, 128, 192, 256),
        block_sizes=(16, 32, 64),
        sliding_window=True,
        soft_cap=True,
        cudagraph=AttentionCGSupport.ALWAYS,
        sinks=True,
        non_causal=True,
        lse=True,
    ),
    builder=FlashAttentionMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
)
