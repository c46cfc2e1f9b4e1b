"""Transformers models on attn_ops: `register()`, then `attn_implementation="attn_ops"`.

The model takes more forward keywords. Transformers passes them to every layer unchanged:

    attn_metadata        AttentionMetadata, the batch
    kv_caches            per layer [num_blocks, 2, block_size, num_kv_heads, head_size], with latent
                         attention [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]; none
                         for layers that share another's (Gemma 3n, Gemma 4), see `cache_index`
    slot_mapping         [T] int64, optional: read from attn_metadata when it is not given
    kv_cache_dtype       auto, fp8_e4m3 (or fp8), fp8_e5m2: what the caches hold
    cross_attn_metadata, cross_kv_caches, cross_slot_mapping
                         the same for the cross-attention of a decoder over its encoder's rows

Tokens of all requests stand in one row: input_ids and position_ids are [1, T]. An encoder takes
`attn_metadata` alone, of `varlen_metadata`.
"""

from attn_ops.integrations.transformers.batch import (
    PackedPositions,
    check_lengths,
    counts_positions,
)
from attn_ops.integrations.transformers.contract import Contract, check_contract
from attn_ops.integrations.transformers.cross import cross_metadata
from attn_ops.integrations.transformers.forward import attention_forward, no_mask
from attn_ops.integrations.transformers.keywords import carry_keywords
from attn_ops.integrations.transformers.layers import NAME, cache_index, check_logits, has_latent
from attn_ops.integrations.transformers.models import (
    attention_configs,
    check_model,
    keeping_attention,
    prepare_model,
)
from attn_ops.integrations.transformers.probe import AttentionProbe
from attn_ops.integrations.transformers.registration import register
from attn_ops.integrations.transformers.sharded import num_ranks, ranks_of_model
from attn_ops.integrations.transformers.specs import attention_specs, cross_attention_specs
from attn_ops.integrations.transformers.states import (
    StateCache,
    StateProbe,
    cache_name,
    state_layers,
    state_specs,
)
from attn_ops.integrations.transformers.weights import write_weights
from attn_ops.tracing import PATCHING, dynamic_batch

__all__ = [
    "NAME",
    "PATCHING",
    "AttentionProbe",
    "Contract",
    "PackedPositions",
    "StateCache",
    "StateProbe",
    "attention_configs",
    "attention_forward",
    "attention_specs",
    "cache_index",
    "cache_name",
    "carry_keywords",
    "check_contract",
    "check_lengths",
    "check_logits",
    "check_model",
    "counts_positions",
    "cross_attention_specs",
    "cross_metadata",
    "dynamic_batch",
    "has_latent",
    "keeping_attention",
    "no_mask",
    "num_ranks",
    "prepare_model",
    "ranks_of_model",
    "register",
    "state_layers",
    "state_specs",
    "write_weights",
]
