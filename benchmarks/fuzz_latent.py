"""What `fuzz_attention` draws, calls and compares of backends of latent attention.

T tokens, N query heads, P head size without RoPE, R with RoPE, V head size of values, Lkv latent,
P blocks, B block size.
"""

import random
from typing import Any

import torch

from attn_ops import AttentionSpec, Backend, LatentShape, write_mla_kv
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionMetadata

HEADS = (1, 2, 3, 4, 8, 16, 20)
MANY_HEADS = (16, 32, 128)
"""Where a backend is made for DeepSeek's sizes alone."""


def draw_latent_spec(rng: random.Random, backend: Backend) -> AttentionSpec:
    """Geometry of a layer with latent attention that the backend declares."""
    support = backend.support
    if support.latent_sizes:
        rank, rope = rng.choice(support.latent_sizes)
        shape, heads = LatentShape(rank, 128, rope, 128), rng.choice(MANY_HEADS)
    else:
        sizes = (16, 32, 48, 64), (8, 16, 24), (8, 16), (8, 16, 32, 64)
        shape, heads = LatentShape(*(rng.choice(size) for size in sizes)), rng.choice(HEADS)
    return AttentionSpec.of_latent(
        heads,
        shape,
        rng.choice(support.dtypes),
        kv_cache_dtype=rng.choice(("auto", *support.kv_cache_dtypes)),
    )


def draw_workspace(rng: random.Random, block_size: int) -> int | None:
    """Tokens of a small workspace, or None: all that a batch has fits."""
    return rng.choice((None, max(block_size, 16), 4 * block_size + 3, rng.randint(64, 400)))


def of_builder(
    spec: AttentionSpec, tokens: int | None, block_size: int, device: torch.device
) -> dict[str, Any]:
    """Keywords of a builder of latent attention."""
    if spec.latent is None:
        return {}
    return {"workspace": MLAWorkspace([spec], max(tokens or 16384, block_size), device)}


def latent_options(spec: AttentionSpec, device: torch.device) -> dict[str, Any]:
    """Keywords of `mla_attention`."""
    assert spec.latent is not None, "asked of latent layers alone"
    options: dict[str, Any] = {"v_head_dim": spec.latent.v_head_dim}
    if spec.kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = spec.kv_cache_dtype
        options["kv_scale"] = torch.tensor([0.5], device=device)
    return options


def draw_kv_b(spec: AttentionSpec, generator: torch.Generator) -> torch.Tensor:
    """[N * (P + V), Lkv]."""
    shape = spec.latent
    assert shape is not None, "asked of latent layers alone"
    rows = spec.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    size = (rows, shape.kv_lora_rank)
    weight = torch.randn(size, generator=generator, device=generator.device)
    return (weight * shape.kv_lora_rank**-0.5).to(spec.dtype)


def write_latents(
    spec: AttentionSpec,
    kv_cache: torch.Tensor,
    expected: torch.Tensor,
    meta: AttentionMetadata,
    options: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """Write new latents, and what must come of it into `expected`; padding goes to block 0."""
    shape, slots_T = spec.latent, meta.common.slot_mapping
    assert shape is not None, "asked of latent layers alone"
    kv_c, k_pe = (
        torch.randn(len(slots_T), width, generator=generator, device=generator.device)
        .to(spec.dtype)
        for width in (shape.kv_lora_rank, shape.qk_rope_head_dim)
    )  # fmt: skip
    scale, fp8 = options.get("kv_scale"), KV_CACHE_DTYPES[spec.kv_cache_dtype]
    write_mla_kv(kv_c, k_pe, kv_cache, meta, kv_cache_dtype=spec.kv_cache_dtype, scale=scale)
    x = torch.cat([kv_c, k_pe], dim=1)
    if fp8 is not None:
        limit = torch.finfo(fp8).max
        x = (x.float() / scale).clamp(-limit, limit).to(fp8).view(torch.uint8)
    size = kv_cache.shape[1]
    expected[slots_T.clamp(min=0) // size, slots_T.clamp(min=0) % size] = x


def keys_and_values(
    spec: AttentionSpec, kv_cache: torch.Tensor, kv_b: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """[P, 2, B, N, max(P + R, V)] float64: what the latents stand for, as a standard cache."""
    shape = spec.latent
    assert shape is not None, "asked of latent layers alone"
    fp8 = KV_CACHE_DTYPES[spec.kv_cache_dtype]
    latent = kv_cache.double() if fp8 is None else kv_cache.contiguous().view(fp8).double()
    if options.get("kv_scale") is not None:
        latent = latent * options["kv_scale"].double()
    c_PBL, k_pe_PBR = latent.split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
    both = (c_PBL @ kv_b.double().t()).unflatten(-1, (spec.num_heads, -1))
    k_nope, v = both.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
    k = torch.cat([k_nope, k_pe_PBR.unsqueeze(2).expand(-1, -1, spec.num_heads, -1)], dim=-1)
    width = max(k.shape[-1], v.shape[-1])
    k, v = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (k, v))
    return torch.stack([k, v], dim=1)


def padded_query(q: torch.Tensor, width: int) -> torch.Tensor:
    """q [T, N, P + R] in the oracle's width; a column of zeros adds nothing to a score."""
    return torch.nn.functional.pad(q, (0, width - q.shape[2]))
