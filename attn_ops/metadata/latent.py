"""The shape of latent attention (MLA, DeepSeek-V2, arXiv:2405.04434).

N query heads, P head size without RoPE, R head size with RoPE, V head size of values, Lkv latent.

A token's cache entry is one latent vector of Lkv numbers and one rotated key of R numbers, which
all heads share. `kv_b` [N * (P + V), Lkv] gives each head its key's first P numbers and its value.
"""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Sizes of a layer with latent attention.

    Raises:
        ValueError: a size is below 1.
    """

    kv_lora_rank: int  # Lkv: numbers of the latent
    qk_nope_head_dim: int  # P: numbers of q and k a head without RoPE
    qk_rope_head_dim: int  # R: numbers with RoPE; the heads share those of k
    v_head_dim: int  # V: numbers of a value a head

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{field.name} must be at least 1, got {size!r}")

    @property
    def cache_width(self) -> int:
        """Lkv + R: numbers of a token in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """P + R: numbers of q a head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LatentOptions:
    """What a layer with latent attention asks for beyond q, the cache and the batch.

    Scores are scale * q.k over P + R numbers, causal.
    """

    scale: float  # factor on q.k
    kv_b: torch.Tensor  # [N * (P + V), Lkv], q's dtype: `kv_b_proj.weight`
    v_head_dim: int  # V
    kv_cache_dtype: str = "auto"  # of KV_CACHE_DTYPES
    kv_scale: torch.Tensor | None = None  # [1] float32: an FP8 cache means stored * kv_scale
    lse: torch.Tensor | None = None  # [T, N] float32, written: log of the softmax's denominator

    def shape_of(self, q: torch.Tensor, kv_cache: torch.Tensor) -> LatentShape:
        """Sizes of the layer: q [T, N, P + R], kv_cache [P, B, Lkv + R].

        Raises:
            ValueError: a size is below 1, as the tensors do not belong together.
        """
        rank = self.kv_b.shape[1]
        rope = kv_cache.shape[2] - rank
        return LatentShape(rank, q.shape[2] - rope, rope, self.v_head_dim)

    def w_uk(self, num_heads: int) -> torch.Tensor:
        """[N, P, Lkv]: what makes a head's key without RoPE of the latent; a view of `kv_b`."""
        return self._by_head(num_heads)[:, : -self.v_head_dim]

    def w_uv(self, num_heads: int) -> torch.Tensor:
        """[N, V, Lkv]: what makes a head's value of the latent; a view of `kv_b`."""
        return self._by_head(num_heads)[:, -self.v_head_dim :]

    def _by_head(self, num_heads: int) -> torch.Tensor:
        return self.kv_b.unflatten(0, (num_heads, -1))


def latent_key(
    q: torch.Tensor, kv_cache: torch.Tensor, o: LatentOptions, rows: int, causal: bool
) -> tuple:
    """Plain values by which a call finds what computes it: equal ones were checked already."""
    return (
        *(q.shape, q.dtype, q.get_device()),
        *(kv_cache.shape, kv_cache.dtype, kv_cache.get_device()),
        *(o.kv_b.shape, o.kv_b.dtype, o.kv_b.get_device()),
        *(o.v_head_dim, o.kv_cache_dtype, o.lse is None, rows, causal),
    )
