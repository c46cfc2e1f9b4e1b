"""What a packed batch needs of a model beside attention: lengths and positions.

T rows of the batch.
"""

from typing import Any

import torch

from attn_ops.integrations.transformers.rotary import rope_boundary


def check_lengths(model: Any, max_tokens: int) -> None:
    """Refuse requests longer than the model's positions, and RoPE that changes with the batch.

    Transformers picks "dynamic" and "longrope" frequencies by the largest position of the batch.
    A batch here holds several requests, so one would change the result of another. While no request
    is longer than the original context, the frequencies are the same for all. Beyond it `LongRope`
    must be there.

    Raises:
        ValueError: `max_tokens` is too large for the model.
    """
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max_tokens
    if type(longest) is int and longest < 0:  # XLNet's -1: no limit
        longest = max_tokens
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [r for r in rope.values() if isinstance(r, dict)]
    for parameters in per_layer_type or [rope]:
        kind = parameters.get("rope_type", "default")
        if kind == "dynamic" or (kind == "longrope" and rope_boundary(model) is None):
            original = parameters.get("original_max_position_embeddings") or longest
            if max_tokens > original:
                raise ValueError(
                    f"max_tokens must be at most {original} with rope_type {kind!r}, whose "
                    f"frequencies depend on the batch beyond it, got {max_tokens}"
                )
    if max_tokens > longest:
        raise ValueError(f"max_tokens must be at most the model's {longest}, got {max_tokens}")


class PackedPositions:
    """Replaces a cache of Transformers for modules that count positions themselves.

    Llama 4 tunes its temperature by the number of tokens that the cache holds. In a packed batch
    that number differs for every row: position minus row. Nothing is stored; keys and values are
    returned unchanged.

    Args:
        position_ids: [1, T] int64, as the model is given it.
    """

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.position_ids = position_ids

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """[T] int64: what to add to a row's number to get its position."""
        rows_T = torch.arange(self.position_ids.shape[1], device=self.position_ids.device)
        return self.position_ids[0] - rows_T

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The arguments: `attention_forward` writes them into the paged cache."""
        return key_states, value_states

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For masks, which are not built."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """For masks, which are not built."""
        return query_length, 0


def counts_positions(model: Any) -> bool:
    """Whether modules of the model count positions themselves, and need `PackedPositions`."""
    return any(getattr(m, "attn_temperature_tuning", False) for m in model.modules())


def compute_all_rows(model: Any) -> None:
    """Make layers that share KV caches compute all rows of the batch.

    Gemma 4 (Transformers 5.24) by itself keeps the last rows of the batch there, which is right for
    one sequence only. It also asks whether there is one row, so a step of one compiles again.
    """
    for module in model.modules():
        if hasattr(module, "_maybe_slice_kv_shared_inputs"):
            module._maybe_slice_kv_shared_inputs = _untouched


def _untouched(*inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
    """All inputs but the last, `logits_to_keep`, unchanged."""
    return inputs[:-1]
