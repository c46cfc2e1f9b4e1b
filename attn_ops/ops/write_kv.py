"""`attn_ops::write_kv`: this step's keys and values into the paged cache.

T tokens, K kv heads, H head size, P physical blocks, B block size.

Two forms of one write. In eager it is one operator. Traced, it is `aten.index_put_` on the cache
itself, which Inductor fuses with what computes k and v (norm, RoPE, scaling). The base tensor is
indexed, never a view of it: a select view makes Inductor clone the whole cache.
"""

import torch

from attn_ops.backends.checks import check_cache_shape
from attn_ops.compat.clones_until_2_15 import unshared
from attn_ops.metadata import AttentionMetadata, kv_dtype_of
from attn_ops.ops.checks import check_cache, check_scales, check_slots, check_v_head_size
from attn_ops.ops.library import operator

SlotMapping = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Slots [T] int64 of a step. Where layers with a window have their own blocks: a pair, first those
of layers that see all keys."""


@operator(mutates=("kv_cache",))
def _write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    slot_mapping: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    dtype = kv_cache.dtype if kv_cache_dtype == "auto" else k.dtype
    check_cache(kv_cache, meta, dtype, kv_cache_dtype)
    slots_T = _slots_of(meta) if slot_mapping is None else slot_mapping
    k, v = unshared(k, kv_cache), unshared(v, kv_cache)
    _put(k, v, kv_cache, slots_T, kv_cache_dtype, k_scale, v_scale)


def _slot_mapping_fake(
    meta: AttentionMetadata, num_tokens: int, device: torch.device
) -> torch.Tensor:
    return torch.empty(num_tokens, dtype=torch.int64, device=device)


@operator(fake=_slot_mapping_fake)
def slot_mapping(
    meta: AttentionMetadata, num_tokens: int | torch.SymInt, device: torch.device
) -> torch.Tensor:
    """The batch's slots [T], for a traced write."""
    slots_T = _slots_of(meta)
    if slots_T.shape[0] != num_tokens:
        raise ValueError(
            f"slot_mapping must have {num_tokens} entries, one a token, got {slots_T.shape[0]}"
        )
    return slots_T.clone()  # an operator's output may not alias state that the compiler cannot see


def _slots_of(meta: AttentionMetadata) -> torch.Tensor:
    """The batch's slots, where they are those of every layer."""
    if meta.common.window_slot_mapping is not None:
        raise ValueError(
            "slot_mapping must be given where layers with a window have blocks of their own, "
            "got None"
        )
    return meta.common.slot_mapping


def slots_of_layer(
    slot_mapping: SlotMapping | None, has_window: bool, meta: AttentionMetadata
) -> torch.Tensor | None:
    """The slots [T] of a layer: of one tensor for all of them, or of a pair by their windows.

    Raises:
        ValueError: a pair is given for a batch of one kind of blocks, or one tensor for two kinds.
            A traced graph cannot read the batch.
    """
    if slot_mapping is None:
        return None
    is_pair = isinstance(slot_mapping, tuple)
    readable = not torch.compiler.is_compiling() and isinstance(meta, AttentionMetadata)
    if readable and is_pair == (meta.common.window_slot_mapping is None):
        wanted, got = ("a tensor", "a pair") if is_pair else ("a pair", "a tensor")
        raise ValueError(
            f"slot_mapping must be {wanted}, as attn_metadata has "
            f"{'no ' if is_pair else ''}window_slot_mapping, got {got}"
        )
    return slot_mapping[1 if has_window else 0] if is_pair else slot_mapping


def _put(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """The checked write, in eager and in a trace."""
    _check_write(k, v, kv_cache, slot_mapping, kv_cache_dtype == "auto")
    check_scales(k_scale, v_scale, kv_cache.device)
    k, v = stored(k, kv_cache_dtype, k_scale), stored(v, kv_cache_dtype, v_scale)
    index_put_kv(k, v, kv_cache, slot_mapping)


def _check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    plain: bool,
) -> None:
    """Raise a ValueError where `index_put_` would broadcast, or Inductor cast.

    `plain`: the cache holds k and v as they are, not as FP8.
    """
    check_cache_shape(kv_cache)
    row = kv_cache.shape[3:]
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[1:] != row:
            raise ValueError(
                f"{name} must have shape [num_tokens, {row[0]}, {row[1]}], got {list(x.shape)}"
            )
        if plain and x.dtype != kv_cache.dtype:
            raise ValueError(f"{name} must have the cache's dtype {kv_cache.dtype}, got {x.dtype}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k {list(k.shape)}, got {list(v.shape)}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"slot_mapping must be int64 of shape [{k.shape[0]}], one a row of k, "
            f"got {slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    check_slots(slot_mapping, kv_cache.shape[0] * kv_cache.shape[2])


def index_put_kv(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The write as one scatter on the base tensor; padding goes to slot 0 of the null block."""
    block_size = kv_cache.shape[2]
    slot_T1 = slot_mapping.clamp(min=0).unsqueeze(1)
    which_2 = torch.arange(2, device=slot_mapping.device)  # keys, values
    places = (slot_T1 // block_size, which_2, slot_T1 % block_size)
    kv_cache.index_put_(places, torch.stack((k, v), 1))


def stored(x: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor | None) -> torch.Tensor:
    """x [T, K, H] as the cache stores it: itself, or x / scale in FP8, saturated, as uint8."""
    fp8 = kv_dtype_of(kv_cache_dtype)
    if fp8 is None:
        return x
    limit = torch.finfo(fp8).max
    x = x.float() if scale is None else x.float() / scale
    if x.requires_grad and torch.is_grad_enabled():  # in a trace; the operator refuses before
        x = x + torch.ops.attn_ops.no_backward(x.detach(), "write_kv")
    return x.clamp(-limit, limit).to(fp8).view(torch.uint8)


def _padded(v: torch.Tensor, kv_cache: torch.Tensor, v_head_size: int) -> torch.Tensor:
    """v [T, K, V] as the cache holds it, [T, K, H]: zeros behind its columns."""
    check_cache_shape(kv_cache)
    check_v_head_size(v_head_size, kv_cache.shape[4], "the cache")
    if v.dim() != 3 or v.shape[2] != v_head_size:
        raise ValueError(
            f"v must have shape [num_tokens, {kv_cache.shape[3]}, {v_head_size}], "
            f"got {list(v.shape)}"
        )
    return torch.nn.functional.pad(v, (0, kv_cache.shape[4] - v_head_size))


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    slot_mapping: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_head_size: int | None = None,
) -> None:
    """Write this step's keys and values at the batch's slots.

    Args:
        k, v: [T, K, H], the cache's dtype, or any with an FP8 cache.
        kv_cache: [P, 2, B, K, H]; mutated. Block 0 is the null block. uint8 for FP8.
        meta: the batch.
        slot_mapping: [T] int64, block * B + offset; None reads it from `meta`. A compiled model is
            given it as an input of the graph, which saves a copy of it.
        kv_cache_dtype: auto, fp8_e4m3 (or fp8), fp8_e5m2.
        k_scale, v_scale: [1] float32, positive, which is not looked at; FP8 stores k / k_scale,
            saturated. None is 1.
        v_head_size: V, where v is [T, K, V] and narrower than H: it is stored padded with zeros,
            and `attention` takes the same number. None is H.

    Rows with PAD_SLOT_ID land in the null block.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; nothing is written.
    """
    if v_head_size is not None:
        v = _padded(v, kv_cache, v_head_size)
    storage = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    if not torch.compiler.is_compiling():
        _write_kv(k, v, kv_cache, meta, slot_mapping=slot_mapping, **storage)
        return
    slots_T = slot_mapping
    if slots_T is None:
        slots_T = torch.ops.attn_ops.slot_mapping(meta, k.shape[0], k.device)
    _put(k, v, kv_cache, slots_T, **storage)
