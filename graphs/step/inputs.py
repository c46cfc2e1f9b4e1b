"""What a session hands to the model in a step."""

from collections.abc import Mapping
from typing import Any

import torch

from attn_ops import AttentionMetadata
from attn_ops.integrations.transformers import AttentionProbe, PackedPositions, counts_positions
from attn_ops.ops.write_kv import SlotMapping


def slots_of(tensors: Mapping[str, torch.Tensor]) -> SlotMapping:
    """The slots of a step, as the model is given them."""
    slots = tensors["slot_mapping"]
    return (slots, tensors["window_slot_mapping"]) if "window_slot_mapping" in tensors else slots


class ModelInputs:
    """Forward keywords of a step, the same ones in every step: another one would recompile.

    Args:
        model: as Transformers made it, uncompiled.
        kv_cache_dtype: what the caches hold.
    """

    def __init__(self, model: Any, kv_cache_dtype: str) -> None:
        self.model = model
        self.counts_positions = counts_positions(model)
        self.constants: dict[str, Any] = {"use_cache": False}
        if kv_cache_dtype != "auto":
            self.constants["kv_cache_dtype"] = kv_cache_dtype

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        metadata: AttentionMetadata | None,
        kv_caches: list[torch.Tensor],
    ) -> dict[str, Any]:
        """Keywords for the device side of a step's tensors."""
        more = self.constants.copy()
        if self.counts_positions:
            more["past_key_values"] = PackedPositions(tensors["position_ids"])
        return more | {
            "input_ids": tensors["input_ids"],
            "position_ids": tensors["position_ids"],
            "attn_metadata": metadata,
            "kv_caches": kv_caches,
            "slot_mapping": slots_of(tensors),
            "logits_to_keep": tensors["logits_indices"],
        }

    def probe(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        logits_rows: torch.Tensor,
        probe: AttentionProbe,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the model as a step does, uncompiled, with a probe in place of attention.

        Arguments: those of `attn_ops.integrations.transformers.contract.Forward`.
        """
        tensors: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "slot_mapping": input_ids[0],  # a probe reads none
            "logits_indices": logits_rows,
        }
        more: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        if position_ids is None:  # the model counts from 0
            more["past_key_values"] = None
        with torch.compiler.set_stance("force_eager"):
            return self.model(**(self(tensors, None, []) | more | {"attn_metadata": probe})).logits
