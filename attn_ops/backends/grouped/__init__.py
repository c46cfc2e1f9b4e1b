"""Different backends for the layers of one model, by their geometry.

    sliding = lambda spec: spec.sliding_window is not None
    backend = grouped_backend({sliding: "FLEX"}, default="TRITON")

Layers whose spec is a key of the mapping, or of whose spec a predicate is true, run on the backend
named there; all others on the default. A step has metadata of every backend that has layers, in
one `AttentionMetadata`; a call of an operator is routed by what it knows of its layer. Layers of
equal geometry cannot be told apart, so they are in one group.

A recording of CUDA graphs need not break around all layers because one group cannot be captured:
`levels` says what every group can, `runs_on` and `captures` say which backend a call goes to.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.grouped.backend import (
    GroupedBackend,
    GroupedSupport,
    Layers,
    captures,
    runs_on,
)
from attn_ops.backends.grouped.builder import GroupedMetadataBuilder
from attn_ops.backends.registry import get_backend
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionOptions,
    AttentionSpec,
)

__all__ = [
    "GroupedBackend",
    "captures",
    "grouped_backend",
    "levels",
    "runs_on",
]


def grouped_backend(
    groups: Mapping[Any, Backend | str], *, default: Backend | str, name: str = "GROUPED"
) -> Backend:
    """A backend that runs layers on other backends, by their geometry.

    It stands wherever a backend does; `register_backend` makes it known by name. Its `support` is
    the default's, with the weakest CUDA graph level and the block sizes that all take; each layer
    is checked against its own group. Attention without a cache is refused.

    Args:
        groups: backends by `Layers`: an `AttentionSpec`, equal to the layers' own in every field,
            or a predicate of one. The first that takes a layer has it.
        default: the backend of all other layers.
        name: upper case; it must be another than those of the groups.

    Example: Gemma's sliding layers on FLEX, its others on TRITON::

        sliding = lambda spec: spec.sliding_window is not None
        register_backend(grouped_backend({sliding: "FLEX"}, default="TRITON", name="GEMMA"))

    Raises:
        ValueError: a group is no layers or no backend, is grouped itself, two backends have one
            name, the name is not upper case, or no block size fits all of them.
    """
    if not isinstance(groups, Mapping):
        raise ValueError(f"groups must be a mapping of layers to backends, got {groups!r:.80}")
    if not isinstance(name, str) or not name or name != name.upper():
        raise ValueError(f"name must be upper case, got {name!r}")
    pairs = tuple((_checked_layers(k), _checked_backend(b)) for k, b in groups.items())
    last = _checked_backend(default)
    if not pairs:
        raise ValueError("groups must name layers, got an empty mapping")
    parts = list({id(b): b for b in [*(backend for _, backend in pairs), last]}.values())
    names = [name, *(part.name for part in parts)]
    if len(set(names)) != len(names):
        raise ValueError(f"names of backend and groups must differ, got {', '.join(names)}")
    builder = type(  # a class of its own: what it declares depends on the groups
        GroupedMetadataBuilder.__name__,
        (GroupedMetadataBuilder,),
        {
            "cudagraph_support": _weakest(parts),
            "plans_on_host": any(part.builder.plans_on_host for part in parts),
            "plans_in_turn": any(getattr(part.builder, "plans_in_turn", False) for part in parts),
            "takes_windows": all(getattr(part.builder, "takes_windows", False) for part in parts),
        },
    )
    unavailable = functools.partial(_unavailable, tuple(parts))
    support = _support_of(parts, last)
    return GroupedBackend(name, support, builder, forward, unavailable, groups=pairs, default=last)


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """By the backend of the layer's group: q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H].

    Raises:
        ValueError: the builder was not given the layer, or its group does not support the call.
    """
    return meta.layer(q, kv_cache, options).attend(q, kv_cache, meta, options)


def levels(backend: Backend, specs: Sequence[AttentionSpec]) -> dict[str, AttentionCGSupport]:
    """Which batches each group of layers can be captured with, by the name of its backend.

    One group for an ordinary backend. Groups without layers among `specs` are left out.
    """
    if not isinstance(backend, GroupedBackend):
        return {backend.name: backend.support.cudagraph}
    used = backend.groups_of(specs)
    return {part.name: part.support.cudagraph for part in backend.parts if part.name in used}


def _checked_layers(layers: Layers) -> Layers:
    if isinstance(layers, AttentionSpec) or callable(layers):
        return layers
    raise ValueError(
        f"groups must be keyed by layers, got {layers!r}; "
        "supported: an AttentionSpec, a predicate of one"
    )


def _checked_backend(backend: Backend | str) -> Backend:
    found = get_backend(backend) if isinstance(backend, str) else backend
    if isinstance(found, GroupedBackend) or not isinstance(found, Backend):
        raise ValueError(
            f"backend of a group must be an ordinary one or its name, got {found!r:.80}"
        )
    return found


def _weakest(parts: Sequence[Backend]) -> AttentionCGSupport:
    return min((part.support.cudagraph for part in parts), key=lambda level: level.value)


def _support_of(parts: Sequence[Backend], default: Backend) -> GroupedSupport:
    supports = [part.support for part in parts]
    limited = [set(s.block_sizes) for s in supports if s.block_sizes]
    block_sizes = tuple(sorted(set.intersection(*limited))) if limited else ()
    if limited and not block_sizes:
        listed = "; ".join(f"{p.name}: {p.support.block_sizes or 'any'}" for p in parts)
        raise ValueError(f"block_sizes of groups must have one in common, got {listed}")
    declared = {f.name: getattr(default.support, f.name) for f in dataclasses.fields(Support)}
    merged = declared | {
        "cudagraph": _weakest(parts),
        "block_sizes": block_sizes,
        "lse": any(s.lse for s in supports),
        "own_mask": any(s.own_mask for s in supports),
        "quantizes_query": any(s.quantizes_query for s in supports),
        "parts": (*(s for s in supports if s is not default.support), default.support),
    }
    return GroupedSupport(**merged)


def _unavailable(parts: Sequence[Backend]) -> str | None:
    missing = [(part.name, part.missing()) for part in parts]
    return next((f"{name}: {reason}" for name, reason in missing if reason), None)
