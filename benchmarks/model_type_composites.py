"""Models that read images and text: their names, and what their small configs need.

Prompts are text alone, so that what runs is the part that decodes. `image-text/llama4` is such a
model, `llama4` the causal model of that name.
"""

from typing import Any

PREFIX = "image-text/"


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


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    """Frequencies of a small head for time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": rope | more}


_CODES = {
    "vocabulary_map": {"<image>": 112, "IMGIMG##A": 113, "IMGIMG##B": 114},
    "vq_config": {"base_channels": 32, "num_res_blocks": 1},
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "chameleon": _CODES,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "emu3": _CODES,
    "ernie4_5_vl_moe_text": _sections(3, 3, 2),
    "glm4v_moe_text": _sections(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": _sections(4, 2, 2),
    "glm5_next": {"text_config": {"index_kpool": 4, "qk_rope_head_dim": 0}},
    "glm_ocr_text": _sections(4, 2, 2),
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
    "hunyuan_vl_text": _sections(4, 2, 2),
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "kosmos-2.5": {"text_config": {"layers": 4, "embed_dim": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": _sections(4, 2, 2),
    "qwen2_5_vl_text": _sections(4, 2, 2),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 113},
    "qwen2_5_omni_text": _sections(4, 2, 2),
    "qwen2_vl_text": _sections(4, 2, 2),
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 113},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
}
"""What a type needs besides its small sizes, by field; dicts are for sub-configs."""

_BLOCKS = "it draws blocks of tokens, not one after another"
_NEED_IMAGES = (
    *("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pi0"),
    *("pix2struct", "pp_formulanet", "udop", "vision-encoder-decoder"),
)
_IMAGE = "its forward asks for an image or boxes beside the text"

NO_REFERENCE = {"diffusion_gemma": _BLOCKS} | dict.fromkeys(_NEED_IMAGES, _IMAGE)
"""Why `generate` cannot run a type by text alone."""
