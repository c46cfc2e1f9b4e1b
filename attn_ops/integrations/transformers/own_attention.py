"""Attention of models that look their class up in a table of their own, by attn_implementation.

GPT-Neo, Falcon and, before Transformers 5.24, GPT-J do not call Transformers' attention functions.
Their tables get a subclass that does; parameters and their names stay. GIT's gets a refusal. Layers
that see images stay as they are.

T rows, N query heads, K kv heads, H head size.
"""

import importlib
from typing import Any

import torch

from attn_ops.integrations.transformers.forward import attention_forward
from attn_ops.integrations.transformers.keywords import carried
from attn_ops.integrations.transformers.layers import NAME


def register_classes() -> None:
    """Put an entry for attn_ops into the tables that the installed Transformers has."""
    for (model_type, table), make in _MAKERS.items():
        try:
            module = importlib.import_module(
                f"transformers.models.{model_type}.modeling_{model_type}"
            )
        except ImportError:  # not in this version
            continue
        classes = getattr(module, table, None)
        if classes is not None and NAME not in classes:
            classes[NAME] = make(classes["eager"], module)


def _gptj(eager: type, module: Any) -> type:
    class GPTJAttention(eager):
        """Scores are divided by sqrt(H)."""

        def _attn(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any = None,
        ) -> tuple[torch.Tensor, None]:
            """query, key, value [1, N, T, H] -> [1, N, T, H]."""
            query, key = query.to(value.dtype), key.to(value.dtype)
            out, _ = attention_forward(self, query, key, value, attention_mask, **carried(self))
            return out.transpose(1, 2), None

    return GPTJAttention


def _gpt_neo(eager: type, module: Any) -> type:
    class GPTNeoSelfAttention(eager):
        """Scores are not scaled; local layers see `window_size` keys, their own included."""

        def __init__(self, config: Any, attention_type: str, layer_id: int | None = None) -> None:
            super().__init__(config, attention_type, layer_id)
            self.config, self.layer_idx, self.scaling = config, layer_id, 1.0
            self.sliding_window = config.window_size if attention_type == "local" else None

        def _attn(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any = None,
        ) -> tuple[torch.Tensor, None]:
            """query, key, value [1, N, T, H] -> [1, N, T, H]; the model's mask has no window."""
            options = {"scaling": 1.0, "sliding_window": self.sliding_window}
            out, _ = attention_forward(self, query, key, value, None, **options, **carried(self))
            return out.transpose(1, 2), None

    return GPTNeoSelfAttention


def _falcon(eager: type, module: Any) -> type:
    class FalconAttention(eager):
        """RoPE; without ALiBi."""

        def __init__(self, config: Any, layer_idx: int | None = None) -> None:
            super().__init__(config, layer_idx)
            if config.alibi:
                raise ValueError(
                    f"config.alibi must be False with attn_implementation={NAME!r}, got True; "
                    "supported: Falcon models with rotary positions"
                )
            self.num_key_value_groups = self.num_heads // self.num_kv_heads

        def forward(
            self,
            hidden_states: torch.Tensor,
            alibi: torch.Tensor | None,
            attention_mask: Any,
            *,
            position_embeddings: tuple[torch.Tensor, torch.Tensor],
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            """hidden_states [1, T, N*H] -> [1, T, N*H] and None."""
            parts = self._split_heads(self.query_key_value(hidden_states))
            query, key, value = (x.transpose(1, 2) for x in parts)
            if self.new_decoder_architecture:  # key and value were repeated for every query head
                groups = self.num_key_value_groups
                key, value = key[:, ::groups], value[:, ::groups]
            query, key = module.apply_rotary_pos_emb(query, key, *position_embeddings)
            out, _ = attention_forward(self, query, key, value, attention_mask, **carried(self))
            return self.dense(out.flatten(2)), None

    return FalconAttention


def _git(eager: type, module: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"attn_implementation must not be {NAME!r} for GIT, whose text sees all of an image "
            "in both directions; supported: eager"
        )

    return refuse


def _eager(eager: type, module: Any) -> type:
    """Layers of images, which no session decodes."""
    return eager


_MAKERS = {
    ("gptj", "GPTJ_ATTENTION_CLASSES"): _gptj,
    ("gpt_neo", "GPT_NEO_ATTENTION_CLASSES"): _gpt_neo,
    ("falcon", "FALCON_ATTENTION_CLASSES"): _falcon,
    ("git", "GIT_SELF_ATTENTION_CLASSES"): _git,
    ("sam", "SAM_VISION_ATTENTION_CLASSES"): _eager,
    ("deepseek_ocr2", "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES"): _eager,
    ("unlimited_ocr", "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES"): _eager,
}
"""By model type and table."""
