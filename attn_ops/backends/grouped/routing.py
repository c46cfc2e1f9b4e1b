"""Where a call goes: by what an operator knows of its layer.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses

import torch

from attn_ops.backends.base import AttentionOptions, Backend
from attn_ops.metadata import AttentionMetadata, AttentionSpec


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """By the backend of the layer's group: q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

    Raises:
        ValueError: the builder was not given the layer, or its group does not support the call.
    """
    part = _part_of(q, kv_cache, meta, options)
    return part.backend.forward(q, kv_cache, part, options)


def _part_of(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> AttentionMetadata:
    """The metadata of the layer's group, found by plain values: a spec takes longer to hash."""
    assert meta.groups is not None, "a grouped backend's builder makes them"
    routes = meta.groups.routes
    key = (
        q.shape,
        q.dtype,
        kv_cache.shape[3],
        options.sliding_window,
        options.soft_cap,
        options.kv_cache_dtype,
        options.alibi_slopes is None,
        options.sinks is None,
        options.lse is None,
    )
    part = routes.get(key)
    if part is None:
        spec = options.spec(q, kv_cache, meta.common.causal)
        part = _planned(meta, spec)
        _check(part.backend, spec, kv_cache, options)
        routes[key] = part
    return part


def _planned(meta: AttentionMetadata, spec: AttentionSpec) -> AttentionMetadata:
    """Layers are as causal as the batch, whatever the spec that the builder was given says."""
    part = meta.plans.get(spec)
    if part is None:
        part = meta.plans.get(dataclasses.replace(spec, causal=not spec.causal))
    if part is not None:
        return part
    raise ValueError(
        f"layer must be one that the builder of backend {meta.backend.name} was given, "
        f"got {spec}; supported: {'; '.join(map(str, meta.plans))}"
    )


def _check(
    backend: Backend, spec: AttentionSpec, kv_cache: torch.Tensor, options: AttentionOptions
) -> None:
    """What the operators ask of `Support`, of the group that runs the layer."""
    reasons = backend.support.reasons_against(spec, kv_cache.shape[2], kv_cache.device)
    if options.lse is not None and not backend.support.lse:
        reasons.append("it cannot return the log-sum-exp; call attention()")
    if reasons:
        raise ValueError(f"backend {backend.name} cannot run this layer: {'; '.join(reasons)}")


def runs_on(meta: AttentionMetadata, spec: AttentionSpec) -> Backend:
    """Which backend attends for a layer of geometry `spec` in this batch.

    Of AUTO, the one it chose for the batch; of a grouped backend, that of the layer's group. With
    `attention_chunk_size` the whole batch's metadata, from which its virtual batches are taken, or
    those already.

    Raises:
        ValueError: the builder was not given such a layer.
    """
    chunk = spec.attention_chunk_size
    if chunk is not None:
        meta = meta.chunked.get(chunk, meta)
        spec = dataclasses.replace(spec, attention_chunk_size=None)
    return meta.backend if meta.groups is None else _planned(meta, spec).backend


def captures(
    meta: AttentionMetadata, options: AttentionOptions, q: torch.Tensor, kv_cache: torch.Tensor
) -> Backend:
    """`runs_on` for a call of `Backend.forward`: its `support.cudagraph` decides the capture."""
    if meta.groups is None:
        return meta.backend
    return runs_on(meta, options.spec(q, kv_cache, meta.common.causal))
