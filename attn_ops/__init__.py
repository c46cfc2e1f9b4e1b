"""Attention operators, backends, batch metadata and a paged KV cache for PyTorch models.

Importing this package defines the operators `torch.ops.attn_ops.*` and does nothing else.
"""

from attn_ops.backends import (
    AttentionOptions,
    Backend,
    Selection,
    Support,
    backend_names,
    get_backend,
    grouped_backend,
    register_backend,
    select_backend,
)
from attn_ops.kv_cache import PagedKVCache
from attn_ops.layers import Attention
from attn_ops.metadata import (
    PAD_SLOT_ID,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    LatentShape,
)
from attn_ops.mla_layer import MLAAttention
from attn_ops.ops import (
    add_rms_norm,
    advance_step,
    attention,
    attention_quant,
    attention_with_lse,
    copy_blocks,
    copy_blocks_mla,
    experts,
    gated_mlp,
    gather_kv,
    gather_mla_kv,
    merge_attn_states,
    merge_attn_states_quant,
    mla_attention,
    mla_attention_quant,
    mla_attention_with_lse,
    norm_mm,
    rms_norm,
    skinny_mm,
    swap_blocks,
    varlen_attention,
    varlen_metadata,
    write_kv,
    write_mla_kv,
)
from attn_ops.tracing import dynamic_batch

__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT_ID",
    "Attention",
    "AttentionCGSupport",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionOptions",
    "AttentionSpec",
    "Backend",
    "CommonAttentionMetadata",
    "LatentShape",
    "MLAAttention",
    "PagedKVCache",
    "Selection",
    "Support",
    "add_rms_norm",
    "advance_step",
    "attention",
    "attention_quant",
    "attention_with_lse",
    "backend_names",
    "copy_blocks",
    "copy_blocks_mla",
    "dynamic_batch",
    "experts",
    "gated_mlp",
    "gather_kv",
    "gather_mla_kv",
    "get_backend",
    "grouped_backend",
    "merge_attn_states",
    "merge_attn_states_quant",
    "mla_attention",
    "mla_attention_quant",
    "mla_attention_with_lse",
    "norm_mm",
    "register_backend",
    "rms_norm",
    "select_backend",
    "skinny_mm",
    "swap_blocks",
    "varlen_attention",
    "varlen_metadata",
    "write_kv",
    "write_mla_kv",
]
