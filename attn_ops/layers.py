"""`Attention`: one attention layer over the paged cache, for models of your own.

T rows of the batch, N query heads, K kv heads, H head size, P physical blocks, B block size.
"""

from typing import Any, Unpack

import torch
from torch import nn

from attn_ops.block_layout import BlockTables, tables_of
from attn_ops.metadata import AttentionMetadata, AttentionSpec
from attn_ops.metadata.features import FEATURES, FeatureArguments, spec_fields
from attn_ops.ops import attention, write_kv
from attn_ops.ops.checks import check_layout, check_scale_values
from attn_ops.ops.write_kv import SlotMapping, slots_of_layer


class Attention(nn.Module):
    """What stands between a model's projections: write k and v, attend over the cache.

    Args:
        num_heads: N.
        num_kv_heads: K, a divisor of N.
        head_size: H.
        scale: factor on q.k; None is H ** -0.5.
        features: `sliding_window` and the other `FeatureArguments`, as `attention` takes them. A
            tensor becomes a buffer of the layer, or stays a parameter. `blocksparse` may also be
            `BlocksparseParams` or a `BlockLayout`; layers with one layout share its `BlockTables`.
        attention_chunk_size: a query sees the keys of its own chunk of so many tokens.
        kv_sharing_target: the layer whose cache this one reads, instead of writing its own. It is
            no submodule: its owner is the model.

    Attributes:
        k_scale, v_scale: [1] float32 or None: FP8 caches hold value / scale. Those of the target
            count where there is one.

    Raises:
        ValueError: a number is out of range, or the target shares a cache itself or has another
            geometry.
    """

    kv_sharing_target: "Attention | None"
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float | None = None,
        *,
        attention_chunk_size: int | None = None,
        kv_sharing_target: "Attention | None" = None,
        **features: Unpack[FeatureArguments],
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.attention_chunk_size = attention_chunk_size
        self._feature_names = tuple(FeatureArguments.__annotations__)
        self._set_features(features)
        for name in ("k_scale", "v_scale"):
            self.register_buffer(name, None)
        # Past nn.Module, which would register it: its parameters are the target's own.
        object.__setattr__(self, "kv_sharing_target", kv_sharing_target)
        if kv_sharing_target is not None and kv_sharing_target.kv_sharing_target is not None:
            raise ValueError(
                "kv_sharing_target must have a cache of its own, got a layer that shares one; "
                "supported: its own target"
            )
        self.spec(torch.float32)  # raises for numbers out of range
        self.scale = head_size**-0.5 if scale is None else scale

    def _set_features(self, features: FeatureArguments) -> None:
        """Numbers as attributes, tensors as parameters or buffers, whichever they are."""
        if unknown := ", ".join(features.keys() - set(self._feature_names)):
            raise TypeError(f"Attention() got an unexpected keyword argument {unknown}")
        blocks = features.get("blocksparse")
        heads = self.num_heads, self.num_kv_heads
        self.blocksparse: BlockTables | None = None if blocks is None else tables_of(blocks, *heads)
        for feature in (f for f in FEATURES if f.name in self._feature_names):
            name, value = feature.name, features.get(feature.name)
            if not feature.per_head:
                setattr(self, name, value)
            elif isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)
            if feature.per_head and value is not None and value.shape != (self.num_heads,):
                got = list(value.shape)
                raise ValueError(f"{name} must have shape [{self.num_heads}], got {got}")

    def spec(self, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> AttentionSpec:
        """Geometry of the layer, for builders; for `PagedKVCache` if it shares no other's cache.

        Args:
            dtype: of q.
            kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2: what the cache holds.

        Raises:
            ValueError: a number is out of range, or differs from that of `kv_sharing_target`; or a
                scale is not finite and above 0, with an FP8 cache.
        """
        if kv_cache_dtype != "auto":
            check_scale_values(self, None)
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            attention_chunk_size=self.attention_chunk_size,
            **spec_fields(self._features()),
        )
        if self.kv_sharing_target is not None:
            _check_equal(spec, self.kv_sharing_target.spec(dtype, kv_cache_dtype))
        return spec

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
        slot_mapping: SlotMapping | None = None,
        kv_cache_dtype: str = "auto",
    ) -> torch.Tensor:
        """Attention of the batch's rows over the cache, in which k and v are written before.

        Args:
            q: [T, N, H].
            k, v: [T, K, H]; None with a `kv_sharing_target`, which has written its own.
            kv_cache: [P, 2, B, K, H], that of the target if there is one.
            attn_metadata: the batch.
            slot_mapping: [T] int64, see `write_kv`; None reads it from `attn_metadata`. A pair:
                for layers that see all keys, and for those with a window.
            kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2: what the cache holds.

        Returns:
            [T, N, H] in q's dtype.

        Raises:
            TypeError: q or kv_cache is no tensor.
            ValueError: k and v are given and the layer shares a cache, or are not and it does not;
                shapes, dtypes or devices do not fit.
        """
        target = self.kv_sharing_target
        self._check(q, k, v, kv_cache)
        owner = self if target is None else target
        stored: dict[str, Any] = {}
        if kv_cache_dtype != "auto":
            stored = {"k_scale": owner.k_scale, "v_scale": owner.v_scale}
            stored["kv_cache_dtype"] = kv_cache_dtype
        check_layout(self.blocksparse, q, attn_metadata)
        if k is not None and v is not None:  # as checked: it owns the cache
            windowed = self.sliding_window is not None or self.attention_chunk_size is not None
            slots_T = slots_of_layer(slot_mapping, windowed, attn_metadata)
            write_kv(k, v, kv_cache, attn_metadata, slot_mapping=slots_T, **stored)
        return attention(
            q,
            kv_cache,
            attn_metadata,
            self.scale,
            attention_chunk_size=self.attention_chunk_size,
            causal=True,
            **self._features(),
            **stored,
        )

    def _features(self) -> dict[str, Any]:
        """What the layer asks for, as the operators take it."""
        return {name: getattr(self, name) for name in self._feature_names}

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        kv_cache: torch.Tensor,
    ) -> None:
        """Raise a ValueError for what the operators do not know: the layer's own geometry."""
        if self.kv_sharing_target is not None and not (k is None and v is None):
            raise ValueError("k and v must be None with kv_sharing_target, got a tensor")
        if self.kv_sharing_target is None and (k is None or v is None):
            raise ValueError(
                "k and v must be tensors, got None; supported: None with kv_sharing_target"
            )
        try:
            if q.dim() != 3 or q.shape[1:] != (self.num_heads, self.head_size):
                raise ValueError(
                    f"q must have shape [num_tokens, {self.num_heads}, {self.head_size}], "
                    f"got {list(q.shape)}"
                )
            if kv_cache.dim() != 5 or kv_cache.shape[3:] != (self.num_kv_heads, self.head_size):
                raise ValueError(
                    "kv_cache must have shape [num_blocks, 2, block_size, "
                    f"{self.num_kv_heads}, {self.head_size}], got {list(kv_cache.shape)}"
                )
        except AttributeError as error:  # asked only then: a right call pays nothing for it
            raise TypeError(
                "q and kv_cache must be tensors, kv_cache that of this layer, "
                f"got {type(q).__name__} and {type(kv_cache).__name__}"
            ) from error

    def extra_repr(self) -> str:
        """The geometry; the target is another layer, and not printed."""
        numbers = f"{self.num_heads}, {self.num_kv_heads}, {self.head_size}"
        return numbers + (", shared cache" if self.kv_sharing_target is not None else "")


def _check_equal(spec: AttentionSpec, target: AttentionSpec) -> None:
    """Raise a ValueError that names the first number in which the caches differ."""
    for name in ("num_kv_heads", "head_size", "dtype", "kv_cache_dtype"):
        got, wanted = getattr(spec, name), getattr(target, name)
        if got != wanted:
            raise ValueError(
                f"{name} must be that of kv_sharing_target {wanted}, got {got}; "
                "supported: layers whose caches are equal"
            )
