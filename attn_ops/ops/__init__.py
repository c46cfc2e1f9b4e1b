"""The operators. Importing this package defines their schemas and nothing else."""

from attn_ops.ops.advance import advance_step
from attn_ops.ops.attention import attention, attention_with_lse
from attn_ops.ops.attention_quant import attention_quant
from attn_ops.ops.cache_blocks import copy_blocks, gather_kv, swap_blocks
from attn_ops.ops.merge import merge_attn_states, merge_attn_states_quant
from attn_ops.ops.mla import mla_attention, mla_attention_with_lse
from attn_ops.ops.mla_cache import copy_blocks_mla, gather_mla_kv, write_mla_kv
from attn_ops.ops.mla_quant import mla_attention_quant
from attn_ops.ops.moe.experts import experts
from attn_ops.ops.moe.top_experts import top_experts
from attn_ops.ops.products.fused_products import gated_mlp, norm_mm
from attn_ops.ops.products.norms import add_rms_norm, rms_norm
from attn_ops.ops.products.skinny_mm import skinny_mm
from attn_ops.ops.states import (
    causal_conv1d_update,
    gated_delta_rule,
    kda,
    selective_state_update,
    ssd_state_update,
)
from attn_ops.ops.varlen import varlen_attention, varlen_metadata
from attn_ops.ops.write_kv import write_kv

__all__ = [
    "add_rms_norm",
    "advance_step",
    "attention",
    "attention_quant",
    "attention_with_lse",
    "causal_conv1d_update",
    "copy_blocks",
    "copy_blocks_mla",
    "experts",
    "gated_delta_rule",
    "gated_mlp",
    "gather_kv",
    "gather_mla_kv",
    "kda",
    "merge_attn_states",
    "merge_attn_states_quant",
    "mla_attention",
    "mla_attention_quant",
    "mla_attention_with_lse",
    "norm_mm",
    "rms_norm",
    "selective_state_update",
    "skinny_mm",
    "ssd_state_update",
    "swap_blocks",
    "top_experts",
    "varlen_attention",
    "varlen_metadata",
    "write_kv",
    "write_mla_kv",
]
