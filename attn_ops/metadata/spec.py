"""Geometry of attention layers: what builders and caches are made for."""

import dataclasses
import math

import torch

KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What a KV cache may hold: the model's dtype, or FP8 in uint8 storage."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Geometry of one attention layer. Layers with equal specs share a plan.

    Lengths are in tokens; `sliding_window` counts the query's own token, as in Transformers and
    FlashAttention's `window - 1` to the left. `dtype` is that of q; the cache holds it too unless
    `kv_cache_dtype` says otherwise.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    soft_cap: float | None = None
    kv_cache_dtype: str = "auto"  # or fp8_e4m3, fp8_e5m2: stored as uint8
    alibi: bool = False  # scores are lowered with the distance of query and key
    sinks: bool = False  # the softmax has one more, learned, logit a head
    causal: bool = True
    attention_chunk_size: int | None = None  # a query sees its own chunk of keys only (Llama 4)

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be known, got {self.kv_cache_dtype!r}; "
                f"supported: {', '.join(KV_CACHE_DTYPES)}"
            )
        for name in ("num_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be None or at least 1, got {self.sliding_window}"
            )
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(
                f"soft_cap must be None or above 0, got {self.soft_cap}; supported: finite numbers"
            )
        if self.attention_chunk_size is not None:
            self._check_chunk()

    def _check_chunk(self) -> None:
        chunk = self.attention_chunk_size
        if chunk is not None and chunk < 1:
            raise ValueError(f"attention_chunk_size must be None or at least 1, got {chunk}")
        for name, value, plain in (
            ("sliding_window", self.sliding_window, None),
            ("alibi", self.alibi, False),
            ("causal", self.causal, True),
        ):
            if value != plain:
                raise ValueError(
                    f"{name} must be {plain} with attention_chunk_size {chunk}, got {value}"
                )

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the cache tensor; FP8 is stored as uint8 (ARCHITECTURE 2.4)."""
        return self.dtype if self.kv_cache_dtype == "auto" else torch.uint8
