"""What one attention layer of Transformers says about itself."""

from typing import Any

import torch

from attn_ops.block_layout import BlockLayout, BlocksparseParams, BlockTables
from attn_ops.integrations.transformers.probe import LogitsOfAllRows
from attn_ops.metadata.features import FeatureArguments

NAME = "attn_ops"
"""`attn_implementation` of models whose attention is ours."""


def is_causal(layer: Any) -> bool:
    """Whether a row sees no later one; decoders that do not say are causal."""
    return getattr(layer, "is_causal", True) is not False


def window(layer: Any) -> int | None:
    """Keys that a row sees, its own included; None: all.

    Where the config gives layer types (EXAONE-4), only sliding layers have a window, whatever the
    layer's attribute says. Mistral and Phi-3 read it from the config, for every layer.
    """
    if _layer_type(layer) not in (None, "sliding_attention"):
        return None
    holder = layer if hasattr(layer, "sliding_window") else getattr(layer, "config", None)
    return getattr(holder, "sliding_window", None) or None


def features(layer: Any) -> FeatureArguments:
    """What the layer asks for, as the operators take it."""
    return {
        "sliding_window": window(layer),
        "soft_cap": getattr(layer, "attn_logit_softcapping", None),
        "sinks": getattr(layer, "sinks", None),
        "blocksparse": blocksparse(layer),
    }


def blocksparse(layer: Any) -> BlockTables | None:
    """Which blocks of keys the layer's rows see: the `BlockTables` that it holds; None: all.

    Raises:
        ValueError: it holds a layout that is no module, whose tables would not move with the model.
    """
    found = getattr(layer, "blocksparse", None)
    if isinstance(found, BlocksparseParams | BlockLayout):
        raise ValueError(
            f"blocksparse of {type(layer).__name__} must be None or BlockTables, "
            f"got {type(found).__name__}; supported: BlockTables(layout), "
            "BlockTables(local_strided(params))"
        )
    return found if isinstance(found, BlockTables) else None


def features_of_call(
    sliding_window: int | None, softcap: float | None, s_aux: torch.Tensor | None
) -> FeatureArguments:
    """What a call asks for, under the names that Transformers' layers have for it."""
    return {"sliding_window": sliding_window, "soft_cap": softcap, "sinks": s_aux}


def chunk_size(layer: Any) -> int | None:
    """Tokens of a chunk: a row sees the keys of its chunk. None: all (Llama 4's other layers)."""
    if _layer_type(layer) != "chunked_attention":
        return None
    return layer.config.attention_chunk_size


def _layer_type(layer: Any) -> str | None:
    """The layer's type by the config; None: the config has no layer types.

    Raises:
        ValueError: the config has fewer layers.
    """
    types = getattr(getattr(layer, "config", None), "layer_types", None)
    if not types:
        return None
    if not 0 <= layer.layer_idx < len(types):
        raise ValueError(
            f"layer_idx must be from 0 to {len(types) - 1}, as config.layer_types has no more, "
            f"got {layer.layer_idx}"
        )
    return types[layer.layer_idx]


def shares_cache(layer: Any) -> bool:
    """Whether the layer reads the keys and values that another one wrote (Gemma 3n, Gemma 4)."""
    return getattr(layer, "is_kv_shared_layer", False)


def cache_owner(layer: Any) -> int:
    """`layer_idx` of the layer whose cache `layer` reads: mostly its own.

    Raises:
        ValueError: the layer shares a cache, and none before it stores one for its layer type.
    """
    if not shares_cache(layer):
        return layer.layer_idx
    stated = getattr(layer, "kv_shared_layer_index", None)  # Gemma 3n in Transformers 5.17
    if stated is not None:
        return stated
    modes = _sharing_modes(layer.config)
    for index in range(layer.layer_idx - 1, -1, -1):
        if modes[index] == "store" and layer.config.layer_types[index] == layer.layer_type:
            return index
    raise ValueError(
        f"layer {layer.layer_idx} must share the cache of an earlier {layer.layer_type} layer, "
        "got none that stores its keys and values"
    )


def cache_index(layer: Any) -> int:
    """Index in `kv_caches` of the cache that the layer reads."""
    if hasattr(layer, "cache_number"):
        return layer.cache_number
    owner = cache_owner(layer)
    if not hasattr(layer, "is_kv_shared_layer"):
        return owner
    return owner - sum(mode == "reuse" for mode in _sharing_modes(layer.config)[:owner])


def _sharing_modes(config: Any) -> list[str | None]:
    """For every layer "reuse", "store", or None where no cache is shared.

    In older configs, which do not say, the last layers share. Each reads the cache of the last
    earlier layer of its type.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return modes
    num_owners = config.num_hidden_layers - config.num_kv_shared_layers
    types = config.layer_types
    return [
        "reuse" if i >= num_owners else None if t in types[i + 1 : num_owners] else "store"
        for i, t in enumerate(types)
    ]


def has_latent(layer: Any) -> bool:
    """Whether the layer's class expands latents, as DeepSeek-V2's does."""
    return hasattr(type(layer), "expand_kv")


def check_logits(logits: torch.Tensor, num_rows: int) -> None:
    """Raise a ValueError unless these are the logits of as many rows as were asked for."""
    if logits.dim() != 3 or logits.shape[:2] != (1, num_rows):
        raise LogitsOfAllRows(
            f"logits must have shape [1, {num_rows}, vocab_size], a row for each entry of "
            f"logits_to_keep, got {list(logits.shape)}; supported: models that compute the rows "
            "which a logits_to_keep tensor names"
        )
