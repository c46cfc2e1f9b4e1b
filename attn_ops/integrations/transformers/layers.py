"""What one attention layer of Transformers says about itself."""

from typing import Any


def is_causal(layer: Any) -> bool:
    """Whether a row sees no later one; decoders that do not say are causal."""
    return getattr(layer, "is_causal", True) is not False


def chunk_size(layer: Any) -> int | None:
    """Tokens of a chunk that a row sees the keys of; None: it sees all (Llama 4's other layers)."""
    types = getattr(getattr(layer, "config", None), "layer_types", None)
    if not types or types[layer.layer_idx] != "chunked_attention":
        return None
    return layer.config.attention_chunk_size
