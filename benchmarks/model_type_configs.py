"""Model types by name, and a small config of each: sizes by the field's name, then by the type.

Causal types, and those that read images and text, whose prompts are text alone, so that what runs
is the part that decodes. `image-text/llama4` is such a model, `llama4` the causal one of that name.
"""

import copy
import dataclasses
from typing import Any

PREFIX = "image-text/"
VOCAB = 128
CHUNK = 16
"""Tokens of a chunk of local attention: one block of the cache."""

RESERVED = (0, 1, 2, 3, *range(112, VOCAB))
"""Tokens that configs give a meaning to, as padding or images; prompts and outputs have none."""

SMALL: dict[str, Any] = {
    # what goes in and out
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    "tie_word_embeddings": False,  # tied, many random models repeat their last token
    "is_decoder": True,
    "add_cross_attention": False,
    "type_vocab_size": 2,
    "logit_scale": 1.0,
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim"), 96),
    **dict.fromkeys(("dff", "d_inner", "dense_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 16),
    # layers; BART counts those of its decoder as num_hidden_layers
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 4),
    "depth": 2,
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads", "swa_num_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    # latent attention and its indexers
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "index_topk"), 8),
    "q_lora_rank": 24,
    # experts, and the chunks of local attention
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    "attention_chunk_size": CHUNK,
    # linear attention and state spaces
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_head_dim", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_chunk_size"), 8),
    "linear_num_key_heads": 2,
    "mamba_d_ssm": 128,
    "n_groups": 1,
    # images and sound, which no prompt has
    "image_size": 32,
    **dict.fromkeys(("patch_size", "num_mel_bins"), 16),
    **dict.fromkeys(("out_hidden_size", "projector_input_dim", "projector_output_dim"), 64),
    "vision_output_dim": 64,
}
"""Values of fields that a config declares, in sub-configs too."""

WINDOWS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    *("local_attention", "keep_window_size"),
)
WINDOW = 8
"""Tokens."""

_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Where keys are expanded from a latent, head_dim is the rotary part, and there are no groups."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ALTERNATING = {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}
_WINDOWED = {"use_sliding_window": True, "max_window_layers": 2}
_WINDOWED_LAST = _WINDOWED | {"layer_types": [_FULL, _FULL, _SLIDING, _SLIDING]}
_CONVOLVED = {"layer_types": ["conv", _FULL, "conv", _FULL]}
_SPARSE_BUT_ONE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
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
_GEMMA4 = {"global_head_dim": 32}
_GEMMA4_SHARED = {"num_global_key_value_heads": 1} | _GEMMA4 | _ALTERNATING
_GEMMA4_MOE = {"enable_moe_block": True, "top_k_experts": 2, "attention_k_eq_v": True}
_DOTS3 = {
    "layer_types": ["indexed_attention", _SLIDING, "indexed_attention", _SLIDING],
    "head_dim": 24,
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
_CODES = {
    "vocabulary_map": {"<image>": 112, "IMGIMG##A": 113, "IMGIMG##B": 114},
    "vq_config": {"base_channels": 32, "num_res_blocks": 1},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
"""Frequencies of a small head for time, height and width."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_config": _BLT, "decoder_config": _BLT},
    "chameleon": _CODES,
    "cohere_compass_text": _ALTERNATING
    | {"rope_parameters": dict.fromkeys((_FULL, _SLIDING), _SECTIONS["rope_parameters"])},
    "cosmos3_edge_text": _SECTIONS,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": _SPARSE_BUT_ONE,
    "dots1": _WINDOWED_LAST | {"n_shared_experts": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "emu3": _CODES,
    "ernie4_5_vl_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
    "gemma3n_text": _SHARING
    | {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0], "intermediate_size": 96},
    "gemma4": {"text_config": _GEMMA4_SHARED | _GEMMA4_MOE | {"hidden_size_per_layer_input": 0}},
    "gemma4_text": _GEMMA4 | _SHARING,
    "gemma4_unified": {"text_config": _GEMMA4_SHARED},
    "gemma4_unified_text": _GEMMA4 | _SHARING,
    "glm4v_moe_text": {
        "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    },
    "glm4v_text": _SECTIONS,
    "glm5_next": {"text_config": {"index_kpool": 4, "qk_rope_head_dim": 0}},
    "glm_ocr_text": _SECTIONS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]},
    "hunyuan_vl_text": _SECTIONS,
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2.5": {"text_config": {"layers": 4, "embed_dim": 64}},
    "laguna": _ALTERNATING | {"num_attention_heads_per_layer": [4, 4, 8, 4]},
    "lfm2": _CONVOLVED | {"full_attn_idxs": None},
    "lfm2_moe": _CONVOLVED,
    "longcat_flash": {"zero_expert_num": 2, "ffn_hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mellum": _ALTERNATING,
    "minimax_m3_vl_text": _SPARSE_BUT_ONE
    | {
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    "ministral": _ALTERNATING,
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "musicgen": _DECODER,
    "musicgen_melody": _DECODER,
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": _SECTIONS,
    "qwen2": _WINDOWED_LAST,
    "qwen2_5_omni_text": _SECTIONS,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 113},
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_moe": _WINDOWED_LAST,
    "qwen2_vl_text": _SECTIONS,
    "qwen3": _WINDOWED_LAST,
    "qwen3_moe": _WINDOWED,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 113},
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
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""What a type needs besides its small sizes, by field; dicts are for sub-configs."""

_DRAFTS = "it drafts from the hidden states and keys of another model"
_NEED_IMAGES = (
    *("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pi0"),
    *("pix2struct", "pp_formulanet", "udop", "vision-encoder-decoder"),
)
NO_REFERENCE = {
    "diffusion_gemma": "it draws blocks of tokens, not one after another",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    **dict.fromkeys(_NEED_IMAGES, "its forward asks for an image or boxes beside the text"),
}
"""Why `generate` cannot run a type by text alone."""

PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Where the model is built from a sub-config only."""

POSITIONS = 256


def classes() -> dict[str, str]:
    """The class of each type: causal ones, then those that read images too, each class once."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    causal = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    return causal | {PREFIX + name: kind for name, kind in images if causal.get(name) != kind}


def plain(name: str) -> str:
    """As Transformers names the type."""
    return name.removeprefix(PREFIX)


def small_config(model_type: str) -> Any:
    """A config of the type with a few small layers, at least one of each kind it has by default.

    Where its layers can have a window, they have one of `WINDOW` tokens.
    """
    from transformers import CONFIG_MAPPING

    model_type = plain(model_type)
    if model_type in NO_REFERENCE:
        raise ValueError(NO_REFERENCE[model_type])
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**_sizes(config_class, OVERRIDES.get(model_type, {})))
    return getattr(config, PART[model_type]) if model_type in PART else config


def _sizes(config_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the config class; those of its sub-configs are dicts among them."""
    fields = {f.name: f.default for f in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in SMALL.items() if name in fields}
    sizes |= {name: WINDOW for name in WINDOWS if name in fields}
    sizes |= _LATENT if "qk_rope_head_dim" in fields else {}
    sizes |= {name: _token(name, default) for name, default in fields.items() if _is_token(name)}
    sizes |= _positions(fields)
    try:
        default = config_class()
    except Exception:  # some have no defaults that fit each other
        return sizes | copy.deepcopy(overrides)
    sizes |= _representative_layers(default, fields)
    sizes |= _as_long_as_defaults(default, sizes)
    own = {k: v for k, v in overrides.items() if k not in config_class.sub_configs}
    return sizes | _sub_sizes(config_class, default, overrides) | copy.deepcopy(own)


def _sub_sizes(config_class: Any, default: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    sizes = {}
    for name in config_class.sub_configs:
        sub = getattr(default, name, None)
        if dataclasses.is_dataclass(sub):
            own = overrides.get(name) or OVERRIDES.get(sub.model_type, {})
            sizes[name] = _sizes(type(sub), own) | {"model_type": sub.model_type}
    return sizes


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index"))


def _token(name: str, default: Any) -> Any:
    """Padding stays where it is, as positions may be counted from it; nothing ends a sequence."""
    if "eos" in name or default is None:
        return None
    if not isinstance(default, int) or default in RESERVED:
        return default
    for i, known in enumerate(("pad", "bos", "sep", "decoder_start", "cls", "mask")):
        if name.startswith(known):
            return i % 4
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


def _representative_layers(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to at least 4 layers: one of every kind, then the first."""
    values_of = vars(default)  # getattr raises for values that differ between layers
    num_layers = values_of.get("num_hidden_layers") if "num_hidden_layers" in fields else None
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
    return sizes | {"num_hidden_layers": len(chosen)}
