"""Different backends for the layers of one model, by their geometry.

    sliding = lambda spec: spec.sliding_window is not None
    backend = grouped_backend({sliding: "FLEX"}, default="TRITON")

Layers whose spec is a key of the mapping, or of whose spec a predicate is true, run on the backend
named there; all others on the default. Layers of equal geometry cannot be told apart, so they are
in one group.

A recording of CUDA graphs need not break around all layers because one group cannot be captured:
`levels` says what every group can, `runs_on` says which backend a call goes to.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.composite import (
    CompositeBackend,
    Sizes,
    builder_for,
    forward,
    part_of,
    weakest,
)
from attn_ops.backends.registry import get_backend
from attn_ops.metadata import AttentionCGSupport, AttentionMetadata, AttentionSpec
from attn_ops.metadata.attention import AttentionBackend

Layers = AttentionSpec | Callable[[AttentionSpec], bool]
"""Which layers a group has: those of one geometry, or all that a predicate takes."""


@dataclasses.dataclass(frozen=True)
class GroupedSupport(Support):
    """Takes what any group takes: the operators ask before it is known which group is meant.

    Builder, selection and the first call of a layer ask the layer's own group.
    """

    parts: tuple[Support, ...] = ()  # the default's last

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = [part.reasons_against(spec, block_size, device) for part in self.parts]
        return [] if [] in reasons else reasons[-1]


class GroupedBackend(CompositeBackend):
    """A composite that goes by the geometry of layers alone; see `grouped_backend`."""


def grouped_backend(
    groups: Mapping[Any, Backend | str], *, default: Backend | str, name: str = "GROUPED"
) -> Backend:
    """A backend that runs layers on other backends, by their geometry.

    It can be used wherever a backend can; `register_backend` makes it known by name. Its `support`
    is the default's, with the weakest CUDA graph level and the block sizes that all take; each
    layer is checked against its own group. Attention without a cache is refused.

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
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"groups must be a mapping of layers to backends, got {groups!r:.80}")
    if not isinstance(name, str) or not name or name != name.upper():
        raise ValueError(f"name must be upper case, got {name!r}")
    for layers in groups:
        if not isinstance(layers, AttentionSpec) and not callable(layers):
            raise ValueError(
                f"groups must be keyed by layers, got {layers!r}; "
                "supported: an AttentionSpec, a predicate of one"
            )
    pairs = tuple((layers, _ordinary(backend)) for layers, backend in groups.items())
    last = _ordinary(default)
    parts = tuple({id(b): b for b in [*(b for _, b in pairs if b is not last), last]}.values())
    names = [name, *(part.name for part in parts)]
    if len(set(names)) != len(names):
        raise ValueError(f"names of backend and groups must differ, got {', '.join(names)}")
    return GroupedBackend(
        name,
        _support_of(parts),
        builder_for(parts),
        forward,
        parts=parts,
        rule=functools.partial(_group_of, pairs, last),
    )


def _ordinary(backend: Backend | str) -> Backend:
    found = get_backend(backend) if isinstance(backend, str) else backend
    if isinstance(found, GroupedBackend) or not isinstance(found, Backend):
        raise ValueError(
            f"backend of a group must be an ordinary one or its name, got {found!r:.80}"
        )
    return found


def _group_of(
    pairs: Sequence[tuple[Layers, Backend]], default: Backend, spec: AttentionSpec, sizes: Sizes
) -> Backend:
    """The backend of the first group that has layers of geometry `spec`."""
    for layers, backend in pairs:
        if layers == spec if isinstance(layers, AttentionSpec) else layers(spec):
            return backend
    return default


def _support_of(parts: Sequence[Backend]) -> GroupedSupport:
    supports = tuple(part.support for part in parts)
    limited = [set(s.block_sizes) for s in supports if s.block_sizes]
    block_sizes = tuple(sorted(set.intersection(*limited))) if limited else ()
    if limited and not block_sizes:
        listed = "; ".join(f"{p.name}: {p.support.block_sizes or 'any'}" for p in parts)
        raise ValueError(f"block_sizes of groups must have one in common, got {listed}")
    merged = {f.name: getattr(supports[-1], f.name) for f in dataclasses.fields(Support)} | {
        "cudagraph": weakest(parts),
        "block_sizes": block_sizes,
        "lse": any(s.lse for s in supports),
        "own_mask": any(s.own_mask for s in supports),
        "quantizes_query": any(s.quantizes_query for s in supports),
    }
    return GroupedSupport(**merged, parts=supports)


def levels(backend: Backend, specs: Sequence[AttentionSpec]) -> dict[str, AttentionCGSupport]:
    """Which batches each group of layers can be captured with, by the name of its backend.

    One group for an ordinary backend. Groups without layers among `specs` are left out.
    """
    if not isinstance(backend, GroupedBackend):
        return {backend.name: backend.support.cudagraph}
    used = backend.used(specs)
    return {part.name: part.support.cudagraph for part in backend.parts if part.name in used}


def runs_on(meta: AttentionMetadata, spec: AttentionSpec) -> AttentionBackend:
    """Which backend attends for a layer of geometry `spec` in this batch.

    Of AUTO, the one it chose for the batch; of a grouped backend, that of the layer's group.

    Raises:
        ValueError: the builder was not given such a layer.
    """
    is_composite = isinstance(meta.backend, CompositeBackend)
    return part_of(meta, spec).backend if is_composite else meta.backend
