"""A batch's metadata: what every attention backend needs to know about a step.

`CommonAttentionMetadata` describes the batch once; a backend's `AttentionMetadataBuilder` turns it
into that backend's `AttentionMetadata`. Around them: splits, virtual batches, fast prefill, the
step on the device. Names of vLLM's that only callers outside need are in `attn_ops/vllm_api.py`.
Nothing here reads device memory, except `validate` when asked to.
"""

from typing import Any

from attn_ops.metadata.advance import advance_step
from attn_ops.metadata.attention import (
    METADATA_TYPE,
    AttentionMetadata,
    Layer,
    LogitsRows,
    M,
    Views,
)
from attn_ops.metadata.buffers import MetadataBuffers
from attn_ops.metadata.builder import AttentionMetadataBuilder
from attn_ops.metadata.cache_layout import (
    KVCacheLayoutType,
    get_kv_cache_layout,
    is_valid_kv_cache_layout,
    set_kv_cache_layout,
)
from attn_ops.metadata.chunked_local import (
    make_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
)
from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.fast_prefill import make_kv_sharing_fast_prefill_common_attn_metadata
from attn_ops.metadata.features import (
    KV_CACHE_DTYPES,
    AttentionCGSupport,
    AttentionOptions,
    AttentionSpec,
    Support,
    kv_dtype_of,
)
from attn_ops.metadata.latent import LatentOptions, LatentShape
from attn_ops.metadata.positions import (
    PAD_SLOT_ID,
    positions_and_slots,
    positions_of_step,
    slots_of_step,
)
from attn_ops.metadata.splits import (
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
)

__all__ = [
    "KV_CACHE_DTYPES",
    "METADATA_TYPE",
    "PAD_SLOT_ID",
    "AttentionCGSupport",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionOptions",
    "AttentionSpec",
    "CommonAttentionMetadata",
    "KVCacheLayoutType",
    "LatentOptions",
    "LatentShape",
    "Layer",
    "LogitsRows",
    "M",
    "MetadataBuffers",
    "Support",
    "Views",
    "advance_step",
    "get_kv_cache_layout",
    "is_valid_kv_cache_layout",
    "kv_dtype_of",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches",
    "max_local_attention_virtual_batches",
    "positions_and_slots",
    "positions_of_step",
    "reorder_batch_to_split_decodes_and_prefills",
    "set_kv_cache_layout",
    "slots_of_step",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
]


def __getattr__(name: str) -> Any:
    """A name of `attn_ops.vllm_api`, which is imported when somebody asks for one."""
    from attn_ops import vllm_api

    if name not in vllm_api.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(vllm_api, name)
