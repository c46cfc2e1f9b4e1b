"""Configs of the models whose decode steps are measured."""

from collections.abc import Callable
from typing import Any


def llama_3_8b(layers: int | None = None) -> Any:
    return _llama(hidden=4096, intermediate=14336, heads=32, layers=layers or 32)


def llama_3_70b(layers: int | None = None) -> Any:
    """20 of its 80 layers: one GPU holds them."""
    return _llama(hidden=8192, intermediate=28672, heads=64, layers=layers or 20)


def _llama(*, hidden: int, intermediate: int, heads: int, layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=128256,
        max_position_embeddings=16384, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip


def qwen3_8b(layers: int | None = None) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers or 36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=16384, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip


def gemma_3_12b(layers: int | None = None) -> Any:
    """Five layers of six see a window of 1,024 keys."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=layers or 48,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, vocab_size=262208,
        max_position_embeddings=16384, sliding_window=1024,
    )  # fmt: skip


def gemma_2_9b(layers: int | None = None) -> Any:
    """Scores are capped; every second layer sees a window of 4,096 keys."""
    from transformers import Gemma2Config

    return Gemma2Config(
        hidden_size=3584, intermediate_size=14336, num_hidden_layers=layers or 42,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, vocab_size=256000,
        max_position_embeddings=16384, sliding_window=4096,
    )  # fmt: skip


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
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers or 48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=16384, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip


def qwen3_5_4b(layers: int | None = None) -> Any:
    """Three of four layers keep a state: the gated delta rule."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        hidden_size=2560, intermediate_size=9216, num_hidden_layers=layers or 32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, vocab_size=248320,
        linear_num_value_heads=32, linear_num_key_heads=16, max_position_embeddings=16384,
        tie_word_embeddings=True,
    )  # fmt: skip


def mixtral_8x7b(layers: int | None = None) -> Any:
    """8 of its 32 layers: one GPU holds them. 8 experts, 2 a token."""
    from transformers import MixtralConfig

    return MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers or 8,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=32000,
        num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip


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
