"""One call of a backend of latent attention: inputs over a poisoned cache, and the comparison.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
P blocks, B block size.
"""

import dataclasses
from typing import Any

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.mla.torch_mla import reference_mla_attention
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import (
    KV_CACHE_DTYPES,
    AttentionMetadata,
    AttentionSpec,
    CommonAttentionMetadata,
    LatentOptions,
    LatentShape,
)
from attn_ops.testing.differences import check_close, check_padding

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
"""Relative error norm against the float64 oracle, by the dtype of q."""

ROUNDED_QUERY = 1.5e-1
"""The same of a backend that rounds q to FP8, as it does with an FP8 cache."""

SMALL = LatentShape(32, 16, 16, 32)
"""Where a backend takes any sizes; the interpreter has to run some."""


@dataclasses.dataclass
class LatentCase:
    """One call: inputs on their device, cache NaN wherever no request has written."""

    q: torch.Tensor  # [T, N, P + R]
    kv_cache: torch.Tensor  # [P, B, Lkv + R]
    meta: AttentionMetadata
    kv_b: torch.Tensor  # [N * (P + V), Lkv]
    spec: AttentionSpec
    keywords: dict[str, Any]  # of `mla_attention`

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the operators take before their keywords."""
        return (self.q, self.kv_cache, self.meta, self.kv_b, self.scale)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Raise unless `out` and `lse` are what the float64 oracle gives, padding defined.

        Both algorithms of the oracle count: they are compared with each other first.
        """
        common, outs = self.meta.common, []
        want_lse = torch.empty(self.q.shape[:2], device=self.q.device)
        options = LatentOptions(self.scale, self.kv_b, lse=want_lse, **self.keywords)
        for algorithm in ("absorbed", "up-projected"):
            outs.append(
                reference_mla_attention(self.q, self.kv_cache, common, options, algorithm=algorithm)
            )
        check_close("the other algorithm's out", outs[1], outs[0], torch.float64, common)
        least = TOLERANCE[self.q.dtype]
        fp8 = self.spec.kv_cache_dtype != "auto"
        if fp8 and self.meta.backend.support.quantizes_query:
            least = ROUNDED_QUERY
        check_close("out", out, outs[0], self.q.dtype, common, least)
        check_padding(out, common.num_actual_tokens)
        if lse is not None:
            limit = max(least, 1e-5) * 3
            check_close("lse", lse, want_lse, torch.float32, common, limit, elementwise=True)


def shape_of(support: Support) -> LatentShape:
    """Sizes that the backend takes; small where it takes any."""
    if not support.latent_sizes:
        return SMALL
    rank, rope = support.latent_sizes[0]
    return LatentShape(rank, 128, rope, 128)


def make_latent_case(
    backend: Backend,
    dtype: torch.dtype,
    lengths: tuple[list[int], list[int]],
    block_size: int,
    device: str = "cpu",
    *,
    num_heads: int = 4,
    num_padding_rows: int = 2,
    workspace_tokens: int | None = None,
    known_lengths: bool = True,
    **geometry: Any,
) -> LatentCase:
    """A case for layers of that dtype and geometry, blocks shuffled.

    Args:
        workspace_tokens: of the workspace that the builder is given; None: it makes its own.
        known_lengths: False: without CPU mirrors, as under capture.

    Raises:
        ValueError: the backend does not take the geometry.
    """
    shape, generator = shape_of(backend.support), torch.Generator().manual_seed(sum(lengths[1]))
    spec = AttentionSpec.of_latent(num_heads, shape, dtype, **geometry)
    keywords: dict[str, Any] = {}
    if workspace_tokens is not None:
        keywords["workspace"] = MLAWorkspace([spec], workspace_tokens, device)
    builder = backend.builder(backend, [spec], block_size, device, **keywords)
    (query, seq), rows = lengths, sum(lengths[0]) + num_padding_rows
    table, cache = _cache(spec, seq, block_size, generator)
    common = CommonAttentionMetadata.from_lengths(
        query, seq, table, block_size, device, num_padded_tokens=rows
    )
    if not known_lengths:
        mirrors = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")
        common = common.replace(**dict.fromkeys(mirrors))
    q = torch.randn(rows, num_heads, shape.qk_head_dim, generator=generator)
    q[sum(query) :] = float("nan")
    columns = num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    kv_b = torch.randn(columns, shape.kv_lora_rank, generator=generator)
    asked: dict[str, Any] = {"v_head_dim": shape.v_head_dim}
    if spec.kv_cache_dtype != "auto":
        asked["kv_cache_dtype"] = spec.kv_cache_dtype
        asked["kv_scale"] = torch.tensor([0.5], device=device)
    return LatentCase(
        q.to(dtype).to(device),
        cache.to(device),
        builder.build(0, common),
        (kv_b * shape.kv_lora_rank**-0.5).to(dtype).to(device),
        spec,
        asked,
    )


def _cache(
    spec: AttentionSpec, seq_lens: list[int], block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table [S, M] and cache: NaN where no token stands, block 0 included."""
    width = max([1, *(-(-n // block_size) for n in seq_lens)])
    num_blocks = len(seq_lens) * width + 2
    owned = torch.randperm(num_blocks - 1, generator=generator)[: len(seq_lens) * width] + 1
    table = owned.int().view(len(seq_lens), width)
    values = torch.randn(num_blocks, block_size, spec.head_size, generator=generator)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for blocks, length in zip(table.long(), seq_lens, strict=True):
        full, rest = divmod(length, block_size)
        written[blocks[:full]] = True
        if rest:
            written[blocks[full], :rest] = True
    values = values.masked_fill(~written[..., None], float("nan"))
    fp8 = KV_CACHE_DTYPES[spec.kv_cache_dtype]
    return table, values.to(spec.dtype) if fp8 is None else values.to(fp8).view(torch.uint8)
