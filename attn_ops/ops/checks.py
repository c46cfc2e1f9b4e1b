"""What the operators check before they run."""

import math
from collections.abc import Iterable

import torch

from attn_ops.backends import checks
from attn_ops.backends.checks import check_query as check_query
from attn_ops.block_layout.layout import check_length
from attn_ops.block_layout.tables import BlockTables, num_units
from attn_ops.metadata import PAD_SLOT_ID, AttentionMetadata, AttentionOptions, Layer
from attn_ops.metadata.features import Feature


def layer_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
    attention_chunk_size: int | None = None,
) -> Layer:
    """What computes a call of `attention`.

    Raises:
        ValueError: the tensors do not fit each other or the batch, or the backend does not support
            them.
    """
    layer = meta.layer(q, kv_cache, options, attention_chunk_size)
    if layer.per_head:
        check_per_head(layer.per_head, options, q)
    if options.block_layout is not None or options.sparse_block_size is not None:
        check_block_layout(options, q, kv_cache, meta)
    check_scales(options.k_scale, options.v_scale, q.device)
    return layer


def rows_of_layer(
    meta: AttentionMetadata, q: torch.Tensor, causal: bool | None, logits_rows: bool
) -> AttentionMetadata:
    """The batch as a layer sees it whose rows are those of q [T, N, H].

    Raises:
        ValueError: the batch is not causal as the layer is, or its logits rows are others.
    """
    if causal is not None:
        check_causal(meta, causal)
    return meta.logits_rows(q.shape[0]) if logits_rows else meta


def check_cache(
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
) -> None:
    """Raise a ValueError unless `kv_cache` is one that `meta` was made for: asked once a geometry.

    `dtype` is that of q, k and v. Called before the cache is written, so that a backend that cannot
    read it refuses the write.
    """
    key = (kv_cache.shape, kv_cache.dtype, kv_cache.device, dtype, kv_cache_dtype)
    meta.once(key, lambda: checks.check_cache(kv_cache, meta, dtype, kv_cache_dtype))


def check_layout(blocksparse: BlockTables | None, q: torch.Tensor, meta: AttentionMetadata) -> None:
    """Raise a ValueError unless a layer's layout fits the batch: asked before the layer writes.

    A traced graph cannot read the batch; there the operator refuses it.
    """
    if blocksparse is not None and not torch.compiler.is_compiling():
        blocksparse.check_length(meta.common.max_seq_len)
        if blocksparse.starts.device != q.device:
            raise ValueError(f"blocksparse must be on {q.device}, got {blocksparse.starts.device}")


def check_per_head(features: Iterable[Feature], options: AttentionOptions, q: torch.Tensor) -> None:
    """Raise a ValueError unless the layer's tensors of one value a head fit q [T, N, H]."""
    for feature in features:
        dtype = q.dtype if feature.in_q_dtype else torch.float32
        vector = getattr(options, feature.name)
        check_vector(feature.name, vector, q.shape[1], q.device, dtype)


def check_block_layout(
    options: AttentionOptions, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata
) -> None:
    """Raise a ValueError unless `block_layout` is that of the layer's heads, and long enough."""
    size, layout = options.sparse_block_size, options.block_layout
    if size is None or layout is None or len(layout) != 4:
        raise ValueError(
            "sparse_block_size and the four tensors of block_layout must be given together, "
            f"got {size} and {None if layout is None else len(layout)}"
        )
    starts, columns, _, unit_entries = layout
    if any(t.dtype != torch.int32 or t.device != q.device or not t.is_contiguous() for t in layout):
        raise ValueError(
            f"block_layout must be contiguous int32 tensors on {q.device}, got "
            f"{', '.join(f'{t.dtype} on {t.device}' for t in layout)}"
        )
    num_rows = starts.shape[-1]
    units = num_units(q.shape[1], kv_cache.shape[3])
    wanted = ((q.shape[1], num_rows), (len(columns),), (units, num_rows), (len(unit_entries), 2))
    if tuple(tuple(t.shape) for t in layout) != wanted:
        raise ValueError(
            f"block_layout must have shapes {wanted}, got {[list(t.shape) for t in layout]}"
        )
    check_length(meta.common.max_seq_len, (num_rows - 1) * size)


def check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Raise a ValueError for slots beyond the cache, before any is written: where the host sees."""
    if slot_mapping.is_cpu and slot_mapping.numel() and not torch.compiler.is_compiling():
        slots = slot_mapping.numpy()
        lowest, highest = slots.min(), slots.max()
        if lowest < PAD_SLOT_ID or highest >= num_slots:
            raise ValueError(
                f"slot_mapping must hold {PAD_SLOT_ID} or slots from 0 to {num_slots - 1}, "
                f"got slots from {lowest} to {highest}"
            )


def check_v_head_size(v_head_size: int, head_size: int, of: str) -> None:
    """Raise a ValueError unless values may have `v_head_size` columns of `of`'s `head_size`."""
    if not 1 <= v_head_size <= head_size:
        raise ValueError(
            f"v_head_size must be from 1 to {of}'s head size {head_size}, got {v_head_size}"
        )


def check_causal(meta: AttentionMetadata, causal: bool) -> None:
    """Raise a ValueError unless the batch is causal as the layer is."""
    if meta.common.causal != causal:
        names = {True: "causal", False: "non-causal"}
        raise ValueError(
            f"attn_metadata must be {names[causal]} for this layer, "
            f"got {names[bool(meta.common.causal)]} metadata"
        )


def check_vector(
    name: str,
    vector: torch.Tensor | None,
    length: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise unless `vector` is None or [length] float32 or `dtype` on `device`, contiguous."""
    if vector is None:
        return
    dtypes = dict.fromkeys((torch.float32, dtype))
    if vector.dtype not in dtypes or vector.shape != (length,):
        raise ValueError(
            f"{name} must be {' or '.join(map(str, dtypes))} of shape [{length}], "
            f"got {vector.dtype} {list(vector.shape)}"
        )
    if not vector.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {vector.stride(0)}")
    if vector.device != device:
        raise ValueError(f"{name} must be on {device}, got {vector.device}")


def check_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, device: torch.device
) -> None:
    """Raise a ValueError unless the scales of an FP8 cache are None or [1] float32 on `device`."""
    check_vector("k_scale", k_scale, 1, device)
    check_vector("v_scale", v_scale, 1, device)


SCALES = ("k_scale", "v_scale", "kv_scale")


def check_scale_values(
    layer: object,
    device: torch.device | None,
    of: str = "",
    used: tuple[str, ...] = ("k_scale", "v_scale"),
) -> None:
    """Raise a ValueError unless the scales of a layer's FP8 cache are None or finite and above 0.

    Reads them from the device: when a layer or session is made, not in a step. Scales by other
    names than those `used` would silently not count, so they are refused.
    """
    for name in SCALES:
        scale = getattr(layer, name, None)
        if scale is None:
            continue
        if name not in used:
            raise ValueError(f"{name}{of} must be None, got {scale!r}; supported: {used}")
        if not isinstance(scale, torch.Tensor):
            raise ValueError(f"{name}{of} must be a tensor of shape [1] or None, got {scale!r}")
        check_vector(f"{name}{of}", scale, 1, device or scale.device)
        if not scale.is_meta and not 0 < (value := scale.item()) < math.inf:
            raise ValueError(f"{name}{of} must be finite and above 0, got {value}")
    for part, name in (("k_proj", "k_scale"), ("v_proj", "v_scale")):
        if getattr(getattr(layer, part, None), name, None) is not None:
            raise ValueError(
                f"{part}.{name}{of} must be None, got a scale; supported: {name} of the attention "
                "layer itself"
            )
