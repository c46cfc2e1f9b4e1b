"""Which FlashAttention library there is, and how the upstream ones are called.

T tokens, N query heads, K kv heads, H head size, V head size of values, P blocks, B block size.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.metadata import AttentionSpec, CommonAttentionMetadata

LIBRARIES = ("vllm.vllm_flash_attn", "vllm_flash_attn", "flash_attn_interface", "flash_attn")
"""The vLLM builds come first: they carry FA2 and FA3 with a paged cache of small blocks."""


UPSTREAM_FA3 = "flash_attn_interface"


# Cached: each library that is missing takes 0.15 ms to miss (a CPU, 2026-11-22).
@functools.cache
def find_library() -> tuple[str, ModuleType] | None:
    """The first of `LIBRARIES` that imports and has a varlen function, or None.

    An old build of vLLM's is taken where there is no other, to be refused by name.
    """
    old = None
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if not hasattr(module, "flash_attn_varlen_func"):
            continue
        if not _is_old(name, module):
            return name, module
        old = name, module
    return old


def _is_old(name: str, module: ModuleType) -> bool:
    """vLLM's build of before FA3, up to 2.6.2, which the package index still has."""
    return name in LIBRARIES[:2] and not hasattr(module, "is_fa_version_supported")


# Cached: asks the device; every call of a layer needs the answer.
@functools.cache
def fa_version() -> int | None:
    """3 or 2, whichever the vLLM build supports on this device; None for an upstream build."""
    found = find_library()
    if found is None or not hasattr(found[1], "is_fa_version_supported"):
        return None
    return next((version for version in (3, 2) if found[1].is_fa_version_supported(version)), None)


# Cached: imports a library, and asks the device; each selection asks.
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


def found_library() -> tuple[str, ModuleType]:
    found = find_library()
    assert found is not None, "FLASH_ATTN is selected only where a library was found"
    return found


# Cached: found once, not once a layer.
@functools.cache
def varlen_function() -> Callable[..., Any]:
    """`flash_attn_varlen_func` of the library: resolved once, not once a layer."""
    return found_library()[1].flash_attn_varlen_func


def window_sizes(window: int | None, causal: bool) -> tuple[int, int]:
    """FlashAttention counts the keys to the left and right of the query's own; -1 is no limit."""
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else window - 1


def upstream_forward(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    out_TNH: torch.Tensor,
) -> torch.Tensor:
    """Upstream FA3 (`flash_attn_interface`), whose paged entry point is the KV-cache function.

    Upstream FA2 has no ragged queries over a paged cache of small blocks, so it is refused.
    """
    name, module = found_library()
    if name != UPSTREAM_FA3:
        raise ValueError(_no_ragged_attention())
    rows = common.num_actual_tokens
    result = module.flash_attn_with_kvcache(
        q[:rows],
        kv_cache[:, 0],
        kv_cache[:, 1],
        cache_seqlens=common.seq_lens,
        page_table=common.block_table_tensor,
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_q=common.max_query_len,
        softmax_scale=options.scale,
        causal=common.causal,
        window_size=window_sizes(options.sliding_window, common.causal),
        softcap=options.soft_cap or 0.0,
        return_softmax_lse=options.lse is not None,
    )
    if options.lse is None:
        out_TNH[:rows] = result
    else:
        out_TNH[:rows] = result[0]
        options.lse[:rows] = result[1][:, :rows].transpose(0, 1)
    return out_TNH


def upstream_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    out_TNV: torch.Tensor,
) -> torch.Tensor:
    """Without a cache, by keywords that upstream FA2 and FA3 share."""
    rows = common.num_actual_tokens
    result = varlen_function()(
        q[:rows],
        k[:rows],
        v[:rows],
        cu_seqlens_q=common.query_start_loc,
        cu_seqlens_k=common.query_start_loc,
        max_seqlen_q=common.max_query_len,
        max_seqlen_k=common.max_query_len,
        softmax_scale=options.scale,
        causal=common.causal,
        window_size=window_sizes(options.sliding_window, common.causal),
        softcap=options.soft_cap or 0.0,
    )
    # The first FA3 releases return the log-sum-exp besides.
    out_TNV[:rows] = result[0] if isinstance(result, tuple) else result
    return out_TNV


def _no_ragged_attention() -> str:
    name, module = found_library()
    found = f"{name} of before FA3" if _is_old(name, module) else name
    return (
        f"FLASH_ATTN library must have ragged paged attention, got {found}; supported: "
        f"{' or '.join(LIBRARIES[:2])} as vLLM ships it, {UPSTREAM_FA3}"
    )


def has_ragged_upstream() -> bool:
    """Whether the library is upstream's FA3, which takes ragged batches over a paged cache."""
    return fa_version() is None and found_library()[0] == UPSTREAM_FA3


def reasons_of_library(spec: AttentionSpec) -> list[str]:
    """Why the library that is here cannot take layers of geometry `spec`; empty if it can."""
    name, vllm = found_library()[0], ", ".join(LIBRARIES[:2])
    if fa_version() is None and name != UPSTREAM_FA3:
        return [_no_ragged_attention()]
    reasons = []
    if spec.kv_cache_dtype != "auto" and fa_version() != 3:
        kernels = name if fa_version() is None else f"FA{fa_version()}"
        reasons.append(
            f"kv_cache_dtype must be auto with {kernels}, got {spec.kv_cache_dtype}; "
            f"supported with: FA3 of {vllm}"
        )
    return reasons


def check_fp8() -> None:
    """Raise a ValueError unless the kernels here are those that read FP8 caches."""
    if fa_version() == 3:
        return
    reasons = reasons_of_library(AttentionSpec(1, 1, 64, torch.bfloat16, kv_cache_dtype="fp8_e4m3"))
    if reasons:
        raise ValueError("; ".join(reasons))
