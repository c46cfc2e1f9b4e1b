"""Transformers models of a few thousand weights, and prompts of them."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from attn_ops import CommonAttentionMetadata, get_backend

_SHARING = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [f"{t}_attention" for t in ("sliding", "sliding", "full", "sliding", "full")],
    "head_dim": 16,
    "sliding_window": 6,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = _LATENT | {
    "head_dim": 8,  # of RoPE
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 10}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": 7}),
    "cohere2": (
        "Cohere2Config",
        {
            "pad_token_id": 0,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 1.0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Latent attention: one layer with a dense MLP, further ones with experts.
    "deepseek_v2": ("DeepseekV2Config", _EXPERTS),
    "deepseek_v3": ("DeepseekV3Config", _EXPERTS | {"rope_parameters": _YARN}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _EXPERTS),
    "axk1": ("AXK1Config", _EXPERTS),
    "youtu": ("YoutuConfig", _LATENT),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    # Layer 3 shares the cache of layer 1, layer 4 that of layer 2.
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SHARING,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_SHARING, "global_head_dim": 32, "use_double_wide_mlp": True},
    ),
}
"""Config class and sizes; models whose layers share caches fix their number of layers."""

MORE_CONFIGS = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "phi": ("PhiConfig", {"resid_pdrop": 0.3, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {"pad_token_id": 0}),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.7}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "pad_token_id": 0,
        },
    ),
}
"""Of `tests.fuzz.programs` alone."""


def build_model(
    name: str = "llama", attn_implementation: str = "attn_ops", num_layers: int = 2, **overrides
):
    """A Transformers model of a few thousand weights, large enough for its attention to matter.

    No eos token ends its generations, unless `overrides` name one.
    """
    transformers = pytest.importorskip("transformers")
    from attn_ops.integrations.transformers import register

    register()
    config_name, own = (CONFIGS | MORE_CONFIGS)[name]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    config = getattr(transformers, config_name)(**{**sizes, **own, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation
    ).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("sinks"):
            parameter.data.normal_(0, 0.2 if parameter.dim() > 1 else 1.0)
    model.generation_config.eos_token_id = overrides.get("eos_token_id")
    return model.requires_grad_(False)


@torch.no_grad()
def generated(
    model, prompt: list[int], max_new_tokens: int, implementation: str = "eager", **options
) -> list[int]:
    """Tokens of Transformers' `generate`, with attention of its own."""
    own = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        ids, more = torch.tensor([prompt]), {"max_new_tokens": max_new_tokens, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **(more | options))
    finally:
        model.set_attn_implementation(own)
    return out[0, len(prompt) :].tolist()


@dataclasses.dataclass
class Prompts:
    """Prompts of a model as the keywords of one prefill step over a poisoned cache."""

    token_ids: list[list[int]]
    caches: list[torch.Tensor]
    keywords: dict

    @property
    def last_rows(self) -> list[int]:
        return self.keywords["attn_metadata"].common.query_start_loc_cpu[1:].sub(1).tolist()


def build_prompts(
    model: torch.nn.Module, lengths: Sequence[int], block_size: int = 4, seed: int = 0
) -> Prompts:
    from attn_ops import PagedKVCache
    from attn_ops.integrations.transformers import attention_specs

    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]
    specs = attention_specs(model)
    cache = PagedKVCache(specs, num_tokens=128, block_size=block_size)
    for tensor in cache.tensors:
        tensor[1:] = float("nan")
    for request, n in enumerate(lengths):
        cache.reserve(request, n)
    table_SM = cache.block_table(range(len(lengths)))
    common = CommonAttentionMetadata.from_lengths(lengths, lengths, table_SM, block_size)
    backend = get_backend("TORCH")
    keywords = {
        "input_ids": torch.tensor([[i for prompt in ids for i in prompt]]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "attn_metadata": backend.builder(backend, specs, block_size, "cpu").build(0, common),
        "kv_caches": cache.tensors,
        "slot_mapping": common.slot_mapping,
        "use_cache": False,
    }
    return Prompts(ids, cache.tensors, keywords)
