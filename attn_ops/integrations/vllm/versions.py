"""vLLM's interface, and what differs between its versions 0.24 and 0.33.

| | 0.24 | 0.33 |
|---|---|---|
| a layer's cache | [P, 2, B, K, H], shape and order asked of the backend | [P, K, B, 2 * H] |
| lengths on the host | `_seq_lens_cpu`, unless drafts are pending | none |
| sliding windows | any backend | `supports_sliding_window` |

This file imports vLLM, and only what vLLM imports itself imports this file.
P blocks, B block size, K kv heads, H head size, T tokens, S requests.
"""

import importlib
from typing import Any

import torch

from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.ops.write_kv import index_put_kv, stored

# By name: the project's modules import no kernel library when they are imported, and vLLM is one.
api: Any = importlib.import_module("vllm.v1.attention.backend")
"""The classes that a backend of vLLM derives from."""

logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.attn_ops")
"""Below vLLM's logger, which shows what is said."""

_MODEL_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Names of caches that hold 16-bit numbers, beside "auto"."""


def our_cache_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> str | None:
    """Our name for vLLM's name of what a cache holds; None: we have no such cache.

    `dtype` is that of the model: a cache of another 16-bit type is none of ours.
    """
    if kv_cache_dtype in (None, "auto") or _MODEL_DTYPES.get(kv_cache_dtype) is dtype:
        return "auto"
    return {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}.get(kv_cache_dtype)


def our_cache(kv_cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache as [P, 2, B, K, H], FP8 as uint8: a view."""
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.unflatten(3, (2, -1)).permute(0, 3, 2, 1, 4)
    fp8 = kv_cache.element_size() == 1 and kv_cache.dtype != torch.uint8
    return kv_cache.view(torch.uint8) if fp8 else kv_cache


def stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
    """The order of a cache's dimensions in memory, by the layout that vLLM was asked for (0.24)."""
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    if utils.get_kv_cache_layout() == "NHD":
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)
    return (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)


def our_batch(common: Any, on_host: bool) -> CommonAttentionMetadata:
    """Our description of vLLM's batch; tensors are shared.

    `on_host`: with mirrors of the lengths. Where vLLM has none, this waits for the device.
    """
    num_reqs = int(common.num_reqs)
    if not isinstance(common.causal, bool):
        raise ValueError("causal must be a bool, got a tensor; supported: True, False")
    starts_cpu = seq_lens_cpu = None
    if on_host:
        known = getattr(common, "_seq_lens_cpu", None)
        seq_lens_cpu = (common.seq_lens.cpu() if known is None else known)[:num_reqs]
        starts_cpu = common.query_start_loc_cpu[: num_reqs + 1]
    return CommonAttentionMetadata(
        query_start_loc=common.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=starts_cpu,
        seq_lens=common.seq_lens[:num_reqs],
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=num_reqs,
        num_actual_tokens=int(common.num_actual_tokens),
        max_query_len=int(common.max_query_len),
        max_seq_len=int(common.max_seq_len),
        block_table_tensor=common.block_table_tensor[:num_reqs],
        slot_mapping=common.slot_mapping,
        causal=common.causal,
    )


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write key and value [>= T, K, H] to `kv_cache` [P, 2, B, K, H] at `slot_mapping` [T].

    On a GPU by vLLM's kernel, one launch that leaves rows with slot -1 out.
    """
    if key.is_cuda:
        kernels = importlib.import_module("vllm._custom_ops")
        k_PBKH, v_PBKH = kv_cache.unbind(1)
        kernels.reshape_and_cache_flash(
            key, value, k_PBKH, v_PBKH, slot_mapping, kv_cache_dtype, k_scale, v_scale
        )
        return
    rows = slot_mapping.shape[0]
    ours = "auto" if kv_cache_dtype in (*_MODEL_DTYPES, "auto") else kv_cache_dtype
    k, v = stored(key[:rows], ours, k_scale), stored(value[:rows], ours, v_scale)
    index_put_kv(k, v, kv_cache, slot_mapping)
