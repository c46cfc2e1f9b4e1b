"""A batch's metadata: what every attention backend needs to know about a step.

`CommonAttentionMetadata` describes the batch once; a backend's `AttentionMetadataBuilder` turns it
into that backend's `AttentionMetadata`. Around them: splits, virtual batches, fast prefill, the
step on the device. What only callers outside need under vLLM's names is in `vllm_names/`.
Nothing here reads device memory, except `validate` when asked to.
"""

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
)
from attn_ops.metadata.latent import LatentOptions, LatentShape
from attn_ops.metadata.positions import (
    PAD_SLOT_ID,
    positions_and_slots,
    positions_of_step,
    slots_of_step,
)
from attn_ops.metadata.splits import split_decodes_and_prefills
from attn_ops.metadata.vllm_names.causal_conv1d import compute_causal_conv1d_metadata
from attn_ops.metadata.vllm_names.derived_backends import (
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    KVSharingFastPrefillMetadata,
    create_fast_prefill_custom_backend,
    subclass_attention_backend,
    subclass_attention_metadata,
)
from attn_ops.metadata.vllm_names.layer_parameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    group_layers_by_parameters,
    infer_global_hyperparameters,
)
from attn_ops.metadata.vllm_names.reorder import reorder_batch_to_split_decodes_and_prefills
from attn_ops.metadata.vllm_names.speculative import (
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
)
from attn_ops.metadata.vllm_names.ubatch import (
    UBatchSlice,
    _make_metadata_with_slice,
    slice_query_start_locs,
    split_attn_metadata,
)

__all__ = [
    "KV_CACHE_DTYPES",
    "KV_SHARING_FAST_PREFILL_METADATA_FIELDS",
    "METADATA_TYPE",
    "PAD_SLOT_ID",
    "AttentionCGSupport",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionOptions",
    "AttentionSpec",
    "CommonAttentionMetadata",
    "KVCacheLayoutType",
    "KVSharingFastPrefillMetadata",
    "LatentOptions",
    "LatentShape",
    "Layer",
    "LogitsRows",
    "M",
    "MetadataBuffers",
    "PerLayerParameters",
    "Support",
    "UBatchSlice",
    "Views",
    "_make_metadata_with_slice",
    "advance_step",
    "compute_causal_conv1d_metadata",
    "create_fast_prefill_custom_backend",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "group_layers_by_parameters",
    "infer_global_hyperparameters",
    "is_valid_kv_cache_layout",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches",
    "max_local_attention_virtual_batches",
    "positions_and_slots",
    "positions_of_step",
    "reorder_batch_to_split_decodes_and_prefills",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "set_kv_cache_layout",
    "slice_query_start_locs",
    "slots_of_step",
    "split_attn_metadata",
    "split_decodes_and_prefills",
    "subclass_attention_backend",
    "subclass_attention_metadata",
]
