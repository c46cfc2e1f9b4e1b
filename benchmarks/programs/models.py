"""Small models of many Transformers families, with weights that leave clear margins.

Built twice from one seed, they are the same: once for the session, once as the truth.
"""

import random
from typing import Any

import torch
from torch import nn

VOCAB = 97
LONGEST = 256
"""Positions of a model."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 5, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "sliding_window": 6, **EXPERTS}),
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
    "cohere": ("CohereConfig", {}),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.7}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
    ),
}
"""By name: class of the config, and what it has beside `SIZES`."""

LAYER_TYPES = {
    "gemma2": "sliding_attention",
    "gemma3": "sliding_attention",
    "gpt_oss": "sliding_attention",
    "llama4": "chunked_attention",
}
"""Type of every other layer, the first one included."""


def build(family: str, seed: int, implementation: str) -> Any:
    """The model of a seed: 3 to 5 layers, float32, on the CPU, in evaluation mode."""
    import transformers

    rng = random.Random(f"model-{seed}")
    kind, options = FAMILIES[family]
    num_layers = rng.choice((3, 4, 5))
    options = SIZES | options | {"num_hidden_layers": num_layers}
    if family in LAYER_TYPES:
        types = (LAYER_TYPES[family], "full_attention")
        options["layer_types"] = [types[i % 2] for i in range(num_layers)]
    config = getattr(transformers, kind)(**options)
    if (
        getattr(config, "sliding_window", None) == 0
    ):  # Qwen2-MoE's word for none; longer than all here
        config.sliding_window = 64
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.float32
    )
    _fill(model)
    return model.eval().requires_grad_(False)


def _fill(model: Any) -> None:
    """Weights that let the tokens of a prompt decide what comes next, and by far."""
    for name, p in sorted(model.named_parameters()):
        if p.dim() == 1:  # norms are around what they were, biases around 0
            p.data = p.data + 0.1 * torch.randn(p.shape)
        elif "embed" in name:
            p.data = torch.randn(p.shape) / getattr(
                model.model.embed_tokens, "scalar_embed_scale", 1
            )
        elif "lm_head" in name:
            p.data = torch.randn(p.shape)
        else:
            gain = 3.0 if "q_proj" in name or "k_proj" in name else 1.5
            p.data = torch.randn(p.shape) * gain * p.shape[-1] ** -0.5


def decoder_layers(model: Any) -> nn.ModuleList:
    return model.model.layers


def core(layer: Any) -> Any:
    """A decoder layer without what was wrapped around it."""
    while not hasattr(layer, "self_attn"):
        layer = layer.inner
    return layer


def attention_of(layer: Any) -> Any:
    """The attention module of a layer, without what was wrapped around it."""
    attention = core(layer).self_attn
    while not hasattr(attention, "q_proj"):
        attention = attention.inner
    return attention


def mlp_name(layer: Any) -> str:
    return "feed_forward" if hasattr(core(layer), "feed_forward") else "mlp"
