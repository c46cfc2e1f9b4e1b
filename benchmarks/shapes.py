"""Configs of the models whose decode steps are measured."""

from collections.abc import Callable
from typing import Any


def _config(
    kind: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    *,
    theta: float | None = None,
    **more: Any,
) -> Any:
    """Of a class of Transformers, for up to 16,384 tokens."""
    import transformers

    if theta is not None:
        more["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return getattr(transformers, f"{kind}Config")(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=16384,
        **more,
    )  # fmt: skip


def llama_3_8b(layers: int | None = None) -> Any:
    sizes = {"head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False}
    return _config("Llama", layers or 32, 4096, 14336, 32, 8, theta=500000.0, **sizes)


def llama_3_70b(layers: int | None = None) -> Any:
    """20 of its 80 layers: one GPU holds them."""
    sizes = {"head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False}
    return _config("Llama", layers or 20, 8192, 28672, 64, 8, theta=500000.0, **sizes)


def qwen3_8b(layers: int | None = None) -> Any:
    sizes = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
    return _config("Qwen3", layers or 36, 4096, 12288, 32, 8, theta=1000000.0, **sizes)


def gemma_3_12b(layers: int | None = None) -> Any:
    """Five layers of six see a window of 1,024 keys."""
    sizes = {"head_dim": 256, "vocab_size": 262208, "sliding_window": 1024}
    return _config("Gemma3Text", layers or 48, 3840, 15360, 16, 8, **sizes)


def gemma_2_9b(layers: int | None = None) -> Any:
    """Scores are capped; every second layer sees a window of 4,096 keys."""
    sizes = {"head_dim": 256, "vocab_size": 256000, "sliding_window": 4096}
    return _config("Gemma2", layers or 42, 3584, 14336, 16, 8, **sizes)


def gpt_oss_20b(layers: int | None = None) -> Any:
    """32 experts, 4 a token; heads have sinks."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=layers or 24, num_local_experts=32)


def gpt_oss_120b(layers: int | None = None) -> Any:
    """10 of its 36 layers: one GPU holds them. 128 experts."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=layers or 10)


def qwen3_30b_a3b(layers: int | None = None) -> Any:
    """128 experts, 8 a token."""
    sizes = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
    sizes |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    sizes |= {"norm_topk_prob": True}
    return _config("Qwen3Moe", layers or 48, 2048, 6144, 32, 4, theta=1000000.0, **sizes)


def qwen3_5_4b(layers: int | None = None) -> Any:
    """Three of four layers keep a state: the gated delta rule."""
    sizes = {"head_dim": 256, "vocab_size": 248320, "tie_word_embeddings": True}
    sizes |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16}
    return _config("Qwen3_5Text", layers or 32, 2560, 9216, 16, 4, **sizes)


def mixtral_8x7b(layers: int | None = None) -> Any:
    """8 of its 32 layers: one GPU holds them. 8 experts, 2 a token."""
    sizes = {"head_dim": 128, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    return _config("Mixtral", layers or 8, 4096, 14336, 32, 8, theta=1000000.0, **sizes)


def deepseek_v3_like(layers: int | None = None) -> Any:
    """8 layers with 64 of the 256 experts, 8 a token: one GPU holds them. Latent attention."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        num_hidden_layers=layers or 8, n_routed_experts=64, first_k_dense_replace=1,
        max_position_embeddings=16384,
    )  # fmt: skip


def tiny_llama(layers: int) -> Any:
    """For a run on a CPU, whose figures mean nothing."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=2048,
    )  # fmt: skip


MODELS: dict[str, Callable[[int | None], Any]] = {
    "llama-3-8b": llama_3_8b,
    "qwen3-8b": qwen3_8b,
    "gemma-3-12b": gemma_3_12b,
    "gemma-2-9b": gemma_2_9b,
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-120b": gpt_oss_120b,
    "llama-3-70b": llama_3_70b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen3.5-4b": qwen3_5_4b,
    "mixtral-8x7b": mixtral_8x7b,
    "deepseek-v3-like": deepseek_v3_like,
}
"""By name, a config with so many layers; None: as many as are measured."""
