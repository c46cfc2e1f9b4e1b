"""`MLAAttention`: one layer of latent attention over the paged cache, for models of your own.

T rows of the batch, N query heads, P head size without RoPE, R with RoPE, V head size of values,
Lkv latent, P physical blocks, B block size.
"""

from typing import Any

import torch
from torch import nn

from attn_ops.latent_weights import expansion
from attn_ops.metadata import AttentionMetadata, AttentionSpec, LatentShape
from attn_ops.ops import mla_attention, write_mla_kv
from attn_ops.ops.checks import check_scale_values


class MLAAttention(nn.Module):
    """What stands between a model's projections: write the latents, attend over the cache.

    Args:
        num_heads: N.
        latent: the layer's sizes.
        scale: factor on q.k; None is (P + R) ** -0.5. With YaRN, times its factor squared.
        kv_b_proj: the model's own projection [Lkv] -> [N * (P + V)] without a bias; its owner is
            the model. It may be quantized or have adapters (`expansion`). None: the layer has one.

    Attributes:
        kv_b_proj: the projection, that of the layer or of the model. A model that replaces its own
            sets it here, too.
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
        if kv_b_proj is None:
            rows = num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
            self.kv_b_proj = nn.Linear(latent.kv_lora_rank, rows, bias=False)
            return
        self._set_projection(kv_b_proj)

    def _set_projection(self, kv_b_proj: nn.Module) -> None:
        rows = self.num_heads * (self.latent.qk_nope_head_dim + self.latent.v_head_dim)
        _check_projection(kv_b_proj, rows, self.latent.kv_lora_rank)
        # Past nn.Module, which would register it: its parameters are the model's own.
        object.__setattr__(self, "kv_b_proj", kv_b_proj)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kv_b_proj" and name in vars(self):
            self._set_projection(value)
        else:
            super().__setattr__(name, value)

    def spec(self, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> AttentionSpec:
        """Geometry of the layer, for builders and for `PagedKVCache`.

        Args:
            dtype: of q.
            kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2: what the cache holds.

        Raises:
            ValueError: `kv_scale` is not finite and above 0, with an FP8 cache.
        """
        if kv_cache_dtype != "auto":
            check_scale_values(self, None, used=("kv_scale",))
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
            kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2: what the cache holds.

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
        kv_b = self._weight(q)
        stored: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
        scale = None if kv_cache_dtype == "auto" else self.kv_scale
        write_mla_kv(
            kv_c, k_pe, kv_cache, attn_metadata, slot_mapping=slot_mapping, scale=scale, **stored
        )
        return mla_attention(
            q,
            kv_cache,
            attn_metadata,
            kv_b,
            self.scale,
            v_head_dim=self.latent.v_head_dim,
            kv_scale=scale,
            causal=True,
            **stored,
        )

    def _weight(self, q: torch.Tensor) -> torch.Tensor:
        """[N * (P + V), Lkv] in q's dtype; what is no plain weight is computed in each call anew.

        Raises:
            ValueError: the projection does not fit any more; nothing has been written.
        """
        kv_b = expansion(self.kv_b_proj, q)
        rows = self.num_heads * (self.latent.qk_nope_head_dim + self.latent.v_head_dim)
        if kv_b.shape != (rows, self.latent.kv_lora_rank) or kv_b.device != q.device:
            raise ValueError(
                f"kv_b_proj must have a weight of shape [{rows}, {self.latent.kv_lora_rank}] on "
                f"{q.device}, got {list(kv_b.shape)} on {kv_b.device}"
            )
        return kv_b

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
