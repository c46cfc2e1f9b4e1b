"""Small configs of every causal model type: sizes by the name of the field, then by the type."""

import copy
import dataclasses
from typing import Any

from benchmarks import model_type_composites as composites

VOCAB = 128
CHUNK = 16
"""Tokens of a chunk of local attention: one block of the cache."""

RESERVED = (0, 1, 2, 3, *range(112, VOCAB))
"""Tokens that configs give a meaning to, as padding or images; prompts and outputs have none."""

SMALL: dict[str, Any] = {
    # what goes in and out
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": False,  # tied, many random models repeat their last token
    "is_decoder": True,
    "add_cross_attention": False,
    "use_cross_attention": False,
    "type_vocab_size": 2,
    "logit_scale": 1.0,
    # widths
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "intermediate_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "ffn_dim": 96,
    "dff": 96,
    "d_inner": 96,
    "shared_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
    # layers
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 4,  # BART counts these as num_hidden_layers
    "num_decoder_layers": 4,
    "num_encoder_layers": 4,
    "depth": 2,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    # latent attention and its indexers
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "rotary_dim": 8,
    # experts, and the chunks of local attention
    "attention_chunk_size": CHUNK,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 1,
    # images and sound, which no prompt has
    "image_size": 32,
    "patch_size": 16,
    "num_mel_bins": 16,
    "out_hidden_size": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
"""Values of fields that a config declares, in sub-configs too."""

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window_size",
    "local_attention",
    "keep_window_size",
)

_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Where keys are expanded from a latent, head_dim is the rotary part, and there are no groups."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ALTERNATING = {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_WINDOWED = {"use_sliding_window": True, "max_window_layers": 2}
_WINDOWED_LAST = _WINDOWED | {"layer_types": [_FULL, _FULL, _SLIDING, _SLIDING]}
_CONVOLVED = {"full_attn_idxs": None, "layer_types": ["conv", _FULL, "conv", _FULL]}
_INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [2],
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 1,
    "hc_lowrank": 16,
    "eos_token_id": 3,
}
_SHARING = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
}
_GEMMA3N = _SHARING | {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]}
_GEMMA3N |= {"intermediate_size": 96}
_GEMMA4 = {"global_head_dim": 32, "num_global_key_value_heads": 1}
_GEMMA4_MOE = {"enable_moe_block": True, "top_k_experts": 2, "attention_k_eq_v": True}
_GEMMA4_MOE |= {"hidden_size_per_layer_input": 0} | _ALTERNATING
_DOTS3 = {
    "num_hidden_layers": 4,
    "layer_types": ["indexed_attention", _SLIDING, "indexed_attention", _SLIDING],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "head_dim": 24,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_v_head_dim": 16,
}
_BLT = {"hidden_size_global": 64, "num_hidden_layers": 2}
_DECODER = {"decoder": {"num_hidden_layers": 4, "num_codebooks": 1}}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": _BLT,
        "decoder_config": _BLT,
    },
    "cohere_compass_text": _ALTERNATING
    | {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in (_FULL, _SLIDING)
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v4": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": _WINDOWED_LAST | {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4 | _GEMMA4_MOE},
    "gemma4_text": _GEMMA4 | _SHARING,
    "gemma4_unified": {"text_config": _GEMMA4 | _ALTERNATING},
    "gemma4_unified_text": _GEMMA4 | _SHARING,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _ALTERNATING | {"num_attention_heads_per_layer": [4, 4, 8, 4]},
    "lfm2": _CONVOLVED,
    "lfm2_moe": {"layer_types": _CONVOLVED["layer_types"]},
    "longcat_flash": {"zero_expert_num": 2, "ffn_hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mellum": _ALTERNATING,
    "minimax_m3_vl_text": {
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "ministral": _ALTERNATING,
    "musicgen": _DECODER,
    "musicgen_melody": _DECODER,
    "qwen2": _WINDOWED_LAST,
    "qwen2_moe": _WINDOWED_LAST,
    "qwen3": _WINDOWED_LAST,
    "qwen3_moe": _WINDOWED,
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "attention_head_size": 16,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "smollm3": {"use_sliding_window": True, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""What a type needs besides its small sizes, by field; dicts are for sub-configs."""
OVERRIDES |= composites.OVERRIDES

_DRAFTS = "it drafts from the hidden states and keys of another model"
NO_REFERENCE = composites.NO_REFERENCE | {
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
}
"""Why `generate` cannot run a type by itself."""

PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Where the model is built from a sub-config only."""

POSITIONS = 256
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer")


def small_config(model_type: str, window: int = 8) -> Any:
    """A config of the type with a few small layers, at least one of each kind it has by default.

    Where its layers can have a window, they have one of that many tokens.
    """
    from transformers import CONFIG_MAPPING

    model_type = composites.plain(model_type)
    if model_type in NO_REFERENCE:
        raise ValueError(NO_REFERENCE[model_type])
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**_sizes(config_class, OVERRIDES.get(model_type, {}), window))
    return getattr(config, PART[model_type]) if model_type in PART else config


def _sizes(config_class: Any, overrides: dict[str, Any], window: int) -> dict[str, Any]:
    """Arguments of the config class; those of its sub-configs are dicts among them."""
    fields = {f.name: f.default for f in dataclasses.fields(config_class)}
    nested = {k: v for k, v in overrides.items() if k in config_class.sub_configs}
    sizes = {name: value for name, value in SMALL.items() if name in fields}
    sizes |= {name: window for name in WINDOWS if name in fields}
    sizes |= _LATENT if "qk_rope_head_dim" in fields else {}
    sizes |= {name: _token(name, default) for name, default in fields.items() if _is_token(name)}
    sizes |= _positions(fields)
    try:
        default = config_class()
    except Exception:  # some have no defaults that fit each other
        default = None
    if default is not None:
        sizes |= _representative_layers(default, fields)
        sizes |= _as_long_as_defaults(default, sizes) | _rotary_sections(default)
        sizes |= _sub_sizes(config_class, default, nested, window)
        overrides = {k: v for k, v in overrides.items() if k not in nested}
    sizes |= copy.deepcopy(overrides)
    return sizes


def _sub_sizes(
    config_class: Any, default: Any, nested: dict[str, Any], window: int
) -> dict[str, Any]:
    sizes = {}
    for name in config_class.sub_configs:
        sub = getattr(default, name, None)
        if dataclasses.is_dataclass(sub):
            own = nested.get(name) or OVERRIDES.get(sub.model_type, {})
            sizes[name] = _sizes(type(sub), own, window) | {"model_type": sub.model_type}
    return sizes


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index"))


def _token(name: str, default: Any) -> Any:
    """Padding stays where it is, as positions may be counted from it; nothing ends a sequence."""
    if "eos" in name or default is None:
        return None
    if not isinstance(default, int) or default in RESERVED:
        return default
    known = ("pad", "bos", "sep", "decoder_start", "cls", "mask")
    if name.startswith(known):
        return known.index(next(k for k in known if name.startswith(k))) % 4
    return RESERVED[4 + sum(name.encode()) % (len(RESERVED) - 4)]


def _positions(fields: dict[str, Any]) -> dict[str, int]:
    """Learned positions are few; rotary ones stay, as frequencies may be scaled by their number."""
    if "rope_parameters" in fields:
        return {}
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
    return {n: POSITIONS for n in (*names, "max_seq_len", "context_length") if n in fields}


def _as_long_as_defaults(default: Any, sizes: dict[str, Any]) -> dict[str, list[Any]]:
    """Sizes of fields that hold a list, one an axis or an expert."""
    lists = {n: v for n, v in vars(default).items() if n in SMALL and isinstance(v, list | tuple)}
    return {n: [sizes[n]] * len(v) for n, v in lists.items() if isinstance(sizes[n], int)}


def _rotary_sections(default: Any) -> dict[str, Any]:
    """Frequencies of time, height and width: half of what is rotated of a head."""
    rope = getattr(default, "rope_parameters", None) or {}
    if "mrope_section" not in rope:
        return {}
    half = int(SMALL["head_dim"] * (rope.get("partial_rotary_factor") or 1)) // 2
    return {"rope_parameters": rope | {"mrope_section": [half // 2, half // 4, half // 4]}}


def _representative_layers(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to at least 4 layers: one of every kind, then the first."""
    count = next((n for n in _LAYER_COUNTS if n in fields), None)
    num_layers = getattr(default, count, None) if count else None
    values_of = vars(default)  # getattr raises for values that differ between layers
    lists = {
        name: values_of[name]
        for name in fields
        if isinstance(values_of.get(name), (list, tuple)) and len(values_of[name]) == num_layers
    }
    if not lists or num_layers <= 4:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    if len(chosen) > 8:  # numbers of layers, not kinds
        chosen = []
    chosen += [i for i in range(num_layers) if i not in chosen][: max(0, 4 - len(chosen))]
    chosen.sort()
    sizes = {name: [values[i] for i in chosen] for name, values in lists.items()}
    return sizes | {count: len(chosen)}
