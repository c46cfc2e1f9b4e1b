"""`MLAAttention`: one layer of latent attention over the paged cache, for models of your own.

T rows of the batch, N query heads, P head size without RoPE, R with RoPE, V head size of values,
Lkv latent, P physical blocks, B block size.
"""

from typing import Any

import torch
from torch import nn

from attn_ops.metadata import AttentionMetadata, AttentionSpec, LatentShape
from attn_ops.ops import mla_attention, write_mla_kv

_PLAIN = (nn.Parameter, torch.Tensor)


class MLAAttention(nn.Module):
    """What stands between a model's projections: write the latents, attend over the cache.

    Args:
        num_heads: N.
        latent: the layer's sizes.
        scale: factor on q.k; None is (P + R) ** -0.5. With YaRN, times its factor squared.
        kv_b_proj: the model's own projection [Lkv] -> [N * (P + V)] without a bias, of which only
            `weight` is read; its owner is the model. None: the layer has one.

    Attributes:
        kv_b_proj: the projection, that of the layer or of the model.
        kv_scale: [1] float32 or None: FP8 caches hold value / kv_scale.

    Raises:
        ValueError: a number is out of range, or the projection has another shape or a bias.
    """

    kv_scale: torch.Tensor | None
    kv_b_proj: nn.Module

    def __init__(
        self,
        num_heads: int,
        latent: LatentShape,
        scale: float | None = None,
        kv_b_proj: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.latent = num_heads, latent
        self.spec(torch.float32)  # raises for numbers out of range
        self.scale = latent.qk_head_dim**-0.5 if scale is None else scale
        self.register_buffer("kv_scale", None)
        rows = num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        if kv_b_proj is None:
            self.kv_b_proj = nn.Linear(latent.kv_lora_rank, rows, bias=False)
            return
        _check_projection(kv_b_proj, rows, latent.kv_lora_rank)
        # Past nn.Module, which would register it: its parameters are the model's own.
        object.__setattr__(self, "kv_b_proj", kv_b_proj)

    def spec(self, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> AttentionSpec:
        """Geometry of the layer, for builders and for `PagedKVCache`.

        Args:
            dtype: of q.
            kv_cache_dtype: auto, fp8_e4m3 or fp8_e5m2: what the cache holds.
        """
        return AttentionSpec.of_latent(
            self.num_heads, self.latent, dtype, kv_cache_dtype=kv_cache_dtype
        )

    def forward(
        self,
        q: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
        slot_mapping: torch.Tensor | None = None,
        kv_cache_dtype: str = "auto",
    ) -> torch.Tensor:
        """Attention of the batch's rows over the cache, in which the latents are written before.

        Args:
            q: [T, N, P + R], the last R columns behind RoPE.
            kv_c: [T, Lkv], behind its norm.
            k_pe: [T, R], behind RoPE.
            kv_cache: [P, B, Lkv + R].
            attn_metadata: the batch.
            slot_mapping: [T] int64, see `write_mla_kv`; None reads it from `attn_metadata`.
            kv_cache_dtype: auto, fp8_e4m3 or fp8_e5m2: what the cache holds.

        Returns:
            [T, N, V] in q's dtype.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        if q.dim() != 3 or q.shape[1:] != (self.num_heads, self.latent.qk_head_dim):
            raise ValueError(
                f"q must have shape [num_tokens, {self.num_heads}, {self.latent.qk_head_dim}], "
                f"got {list(q.shape)}"
            )
        stored: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
        scale = None if kv_cache_dtype == "auto" else self.kv_scale
        write_mla_kv(
            kv_c, k_pe, kv_cache, attn_metadata, slot_mapping=slot_mapping, scale=scale, **stored
        )
        return mla_attention(
            q,
            kv_cache,
            attn_metadata,
            self._weight(q.dtype),
            self.scale,
            v_head_dim=self.latent.v_head_dim,
            kv_scale=scale,
            causal=True,
            **stored,
        )

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[N * (P + V), Lkv]: the weight itself; a quantized one dequantized, in each call anew."""
        weight: Any = self.kv_b_proj.weight
        return weight if type(weight) in _PLAIN else weight.dequantize().to(dtype)

    def extra_repr(self) -> str:
        """The geometry."""
        return f"{self.num_heads}, {self.latent}"


def _check_projection(kv_b_proj: nn.Module, rows: int, columns: int) -> None:
    weight = getattr(kv_b_proj, "weight", None)
    shape = None if weight is None else list(weight.shape)
    if shape != [rows, columns] or getattr(kv_b_proj, "bias", None) is not None:
        bias = "" if getattr(kv_b_proj, "bias", None) is None else " with a bias"
        raise ValueError(
            f"kv_b_proj must have a weight of shape [{rows}, {columns}] and no bias, "
            f"got {shape}{bias}"
        )
