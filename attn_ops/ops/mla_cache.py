"""`attn_ops::write_mla_kv` and `gather_mla_kv`: the paged cache of latent attention.

T tokens, S requests, M blocks a request may own, R head size with RoPE, Lkv latent, P physical
blocks, B block size.

Two forms of one write, as in `write_kv.py`: one operator in eager; traced, `aten.index_put_` on the
cache itself, which Inductor fuses with the latent's norm and the key's RoPE.
"""

from collections.abc import Sequence

import torch

from attn_ops.backends.checks import check_latent_cache, check_latent_cache_shape
from attn_ops.backends.mla.gather import by_triton, gather_latents
from attn_ops.compat.clones_until_2_15 import unshared
from attn_ops.metadata import AttentionMetadata, LatentShape, kv_dtype_of
from attn_ops.metadata.validation import check_tensor
from attn_ops.ops.cache_blocks import copy_blocks
from attn_ops.ops.checks import check_slots, check_vector
from attn_ops.ops.library import operator
from attn_ops.ops.write_kv import slot_mapping as slots_of_step
from attn_ops.ops.write_kv import stored

# -- write_mla_kv ----------------------------------------------------------------------------------


@operator(mutates=("kv_cache",))
def _write_mla_kv(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    slot_mapping: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    scale: torch.Tensor | None = None,
) -> None:
    slots_T = meta.common.slot_mapping if slot_mapping is None else slot_mapping
    _check_write(kv_c, k_pe, kv_cache, slots_T, kv_cache_dtype, scale)
    dtype = kv_cache.dtype if kv_cache_dtype == "auto" else kv_c.dtype
    key = ("write_mla_kv", kv_cache.shape, kv_cache.dtype, kv_cache.device, kv_c.shape[1], dtype)
    shape = LatentShape(kv_c.shape[1], 1, k_pe.shape[1], 1)  # of any heads
    meta.once(
        (*key, kv_cache_dtype),
        lambda: check_latent_cache(kv_cache, meta, dtype, kv_cache_dtype, shape),
    )
    kv_c, k_pe = unshared(kv_c, kv_cache), unshared(k_pe, kv_cache)
    _write(kv_c, k_pe, kv_cache, slots_T, kv_cache_dtype, scale)


def _write(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slots_T: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor | None,
) -> None:
    """One kernel on a GPU; padding goes to slot 0, of the null block."""
    fp8 = kv_dtype_of(kv_cache_dtype)
    plain_rows = 1 == kv_c.stride(1) == k_pe.stride(1) == slots_T.stride(0)
    if plain_rows and kv_c.dtype != torch.float64 and by_triton(kv_cache, fp8):
        from attn_ops.backends.mla.triton.write import write_latents

        write_latents(kv_c, k_pe, kv_cache, slots_T, fp8, scale)
        return
    latent_TL = stored(torch.cat([kv_c, k_pe], dim=1), kv_cache_dtype, scale)
    slot_T, block_size = slots_T.clamp(min=0), kv_cache.shape[1]
    kv_cache.index_put_((slot_T // block_size, slot_T % block_size), latent_TL)


def _check_write(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor | None,
) -> None:
    """Raise a ValueError, before anything is written, unless the write is well formed."""
    check_latent_cache_shape(kv_cache)
    plain = kv_cache_dtype == "auto"
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        if x.dim() != 2 or x.shape[0] != kv_c.shape[0]:
            raise ValueError(
                f"{name} must have two dimensions and as many rows as kv_c, got {list(x.shape)}"
            )
        if x.dtype != (kv_cache.dtype if plain else kv_c.dtype):
            raise ValueError(
                f"{name} must have the dtype of {'the cache' if plain else 'kv_c'}, got {x.dtype}"
            )
    if kv_c.shape[1] + k_pe.shape[1] != kv_cache.shape[2]:
        raise ValueError(
            f"kv_c and k_pe must have the {kv_cache.shape[2]} columns of the cache together, "
            f"got {kv_c.shape[1]} and {k_pe.shape[1]}"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != kv_c.shape[:1]:
        raise ValueError(
            f"slot_mapping must be int64 of shape [{kv_c.shape[0]}], one a row of kv_c, "
            f"got {slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    check_slots(slot_mapping, kv_cache.shape[0] * kv_cache.shape[1])
    check_vector("scale", scale, 1, kv_cache.device)


def _index_put_columns(
    x: torch.Tensor, first: int, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """x [T, n] into columns from `first` on: a scatter on the base tensor, as in `write_kv.py`.

    The two parts of a row are written apart: a `cat` of them would be a kernel of its own.
    """
    block_size, slot_T1 = kv_cache.shape[1], slot_mapping.clamp(min=0).unsqueeze(1)
    column_n = torch.arange(first, first + x.shape[1], device=x.device)
    kv_cache.index_put_((slot_T1 // block_size, slot_T1 % block_size, column_n), x)


def write_mla_kv(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    slot_mapping: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    scale: torch.Tensor | None = None,
) -> None:
    """Write this step's latents and rotated keys at the batch's slots.

    Args:
        kv_c: [T, Lkv], normed, the cache's dtype, or any with an FP8 cache.
        k_pe: [T, R], behind RoPE, kv_c's dtype.
        kv_cache: [P, B, Lkv + R]; mutated. Block 0 is the null block. uint8 for FP8.
        meta: the batch.
        slot_mapping: [T] int64, block * B + offset; None reads it from `meta`, see `write_kv`.
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2.
        scale: [1] float32, positive, which is not looked at; FP8 stores value / scale, saturated.
            None is 1.

    Rows with PAD_SLOT_ID land in the null block.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; nothing is written.
    """
    storage = {"kv_cache_dtype": kv_cache_dtype, "scale": scale}
    if not torch.compiler.is_compiling():
        _write_mla_kv(kv_c, k_pe, kv_cache, meta, slot_mapping=slot_mapping, **storage)
        return
    slots_T = slot_mapping
    if slots_T is None:
        slots_T = slots_of_step(meta, kv_c.shape[0], kv_c.device)
    _check_write(kv_c, k_pe, kv_cache, slots_T, **storage)
    first = 0
    for x in (kv_c, k_pe):
        _index_put_columns(stored(x, kv_cache_dtype, scale), first, kv_cache, slots_T)
        first += x.shape[1]


# -- gather_mla_kv ---------------------------------------------------------------------------------


@operator(mutates=("out",))
def gather_mla_kv(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    kv_cache_dtype: str = "auto",
    scale: torch.Tensor | None = None,
) -> None:
    """Latents of a part of each request, one after the other, into memory of the caller.

    Computed on the device without reading it: capturable.

    Args:
        kv_cache: [P, B, Lkv + R], out's dtype, or uint8 with an FP8 `kv_cache_dtype`.
        block_table: [S, M] int32; only entries that hold the tokens are used.
        cu_seq_lens: [S + 1] int32: row of `out` where each request begins, and where all end.
        seq_starts: [S] int32: position of each request's first token, anywhere in a page.
        out: [any, Lkv + R]; mutated. Rows from `cu_seq_lens[-1]` on stay as they are.
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2.
        scale: [1] float32: an FP8 cache means stored * scale. None is 1.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_latent_cache_shape(kv_cache)
    device, fp8 = kv_cache.device, kv_dtype_of(kv_cache_dtype)
    check_tensor("seq_starts", seq_starts, (torch.int32,), (None,), device)
    num_reqs = seq_starts.shape[0]
    check_tensor("cu_seq_lens", cu_seq_lens, (torch.int32,), (num_reqs + 1,), device)
    check_tensor("block_table", block_table, (torch.int32,), (num_reqs, None), device)
    check_tensor("out", out, (out.dtype,), (None, kv_cache.shape[2]), device)
    if kv_cache.dtype != (out.dtype if fp8 is None else torch.uint8):
        raise ValueError(
            f"out must have the cache's dtype, and an FP8 cache uint8, got "
            f"{out.dtype} for {kv_cache.dtype} and kv_cache_dtype {kv_cache_dtype}"
        )
    check_vector("scale", scale, 1, device)
    cache = unshared(kv_cache, out)
    gather_latents(cache, block_table, cu_seq_lens, seq_starts, out, kv_scale=scale, fp8=fp8)


def copy_blocks_mla(kv_caches: Sequence[torch.Tensor], block_pairs: torch.Tensor) -> None:
    """`copy_blocks` of caches of latents alone, each [P, B, Lkv + R].

    Raises:
        ValueError: as `copy_blocks`, or a cache has another shape.
    """
    for kv_cache in kv_caches:
        check_latent_cache_shape(kv_cache)
    copy_blocks(kv_caches, block_pairs)
