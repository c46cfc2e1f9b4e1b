"""Transformers models of a few thousand weights with layers that keep states, by model type."""

import pytest
import torch

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_THREE = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
_THREE["layer_types"].append("linear_attention")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_DELTA = _THREE | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_KDA = _THREE | {
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense"] * 4,
}
_ZAMBA = {  # attention with the weights of another layer's
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "num_key_value_heads": 4,
    "n_mamba_heads": 2,
    "mamba_d_state": 8,
    "use_mamba_kernels": False,
}
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_PURE = {"expand": 2, "conv_kernel": 4}
_MAMBA = _PURE | {"state_size": 8, "time_step_rank": 8, "use_mambapy": False}

STATE_CONFIGS: dict[str, dict] = {
    # Gated delta rule.
    "qwen3_next": _DELTA | _SHARED,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _SHARED,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4},
    # KDA, beside latent attention.
    "kimi_linear": _KDA,
    "bailing_hybrid": _KDA,
    # Short convolutions.
    "lfm2": _CONV | {"conv_L_cache": 3, "block_ff_dim": 96, "block_multiple_of": 16},
    "lfm2_moe": _CONV | _EXPERTS | {"conv_L_cache": 3, "num_dense_layers": 1},
    "lfm3": _CONV | {"conv_L_cache": 7},
    # Mamba-2.
    "bamba": _MAMBA2 | {"attn_layer_indices": [2]},
    "granitemoehybrid": _MAMBA2
    | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {  # it clamps step sizes in prompts
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 8,
        "expand": 2,
    },
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64, "mamba_n_heads": 4},  # attends in the same layers
    "mamba2": _PURE
    | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "zamba2": _ZAMBA | {"mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 8},
    # Mamba.
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "zamba": _ZAMBA | {"mamba_dt_rank": 8},  # computes its heads one by one
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
}
"""Sizes by model type; types of a kind stand together."""

PURE = ("mamba", "mamba2", "falcon_mamba")
"""Types without attention, which take no attention implementation."""

RULES = ("qwen3_next", "kimi_linear", "lfm2", "bamba", "jamba")
"""A type of every kind."""


def build_state_model(name: str, **overrides):
    """A model whose states matter to its tokens."""
    transformers = pytest.importorskip("transformers")
    from attn_ops.integrations.transformers import register

    register()
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {name}")
    config = transformers.CONFIG_MAPPING[name](
        **{**_SIZES, **STATE_CONFIGS.get(name, {}), **overrides}
    )
    torch.manual_seed(0)
    more = {} if name in PURE else {"attn_implementation": "attn_ops"}
    model = transformers.AutoModelForCausalLM.from_config(config, **more).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, biases and decays that do something
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
        else:
            parameter.data.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)
