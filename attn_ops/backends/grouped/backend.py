"""A backend made of others, and where a call goes: by what an operator knows of its layer.

T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from attn_ops.backends.base import Backend, Support
from attn_ops.backends.checks import latent_spec
from attn_ops.metadata import (
    AttentionMetadata,
    AttentionOptions,
    AttentionSpec,
    LatentOptions,
    Layer,
)
from attn_ops.metadata.attention import AttentionBackend

Layers = AttentionSpec | Callable[[AttentionSpec], bool]
"""Which layers a group has: those of one geometry, or all that a predicate takes."""


@dataclasses.dataclass(frozen=True)
class GroupedSupport(Support):
    """Takes what any group takes: the operators ask before it is known which group is meant.

    Builder, selection and the first call of a layer ask the layer's own group.
    """

    parts: tuple[Support, ...] = ()

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = [part.reasons_against(spec, block_size, device) for part in self.parts]
        return [] if [] in reasons else reasons[-1]  # the default's


@dataclasses.dataclass(frozen=True)
class GroupedBackend(Backend):
    """A backend made of others; see `grouped_backend`."""

    groups: tuple[tuple[Layers, Backend], ...] = ()
    default: Backend = dataclasses.field(kw_only=True)

    @property
    def parts(self) -> list[Backend]:
        """Every backend once, the default last."""
        named = {b.name: b for _, b in self.groups if b.name != self.default.name}
        return [*named.values(), self.default]

    def group_of(self, spec: AttentionSpec) -> Backend:
        """The backend of layers with geometry `spec`: the first group that has them."""
        for layers, backend in self.groups:
            if layers == spec if isinstance(layers, AttentionSpec) else layers(spec):
                return backend
        return self.default

    def groups_of(self, specs: Sequence[AttentionSpec]) -> dict[str, list[AttentionSpec]]:
        """The distinct geometries of each group that has any."""
        groups: dict[str, list[AttentionSpec]] = {}
        for spec in dict.fromkeys(specs):
            groups.setdefault(self.group_of(spec).name, []).append(spec)
        return groups

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        backend = self.group_of(spec)
        reasons = backend.reasons_against(spec, block_size, device)
        return [f"{backend.name}: {reason}" for reason in reasons]

    def find(
        self,
        meta: AttentionMetadata,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        options: AttentionOptions | LatentOptions,
        spec: AttentionSpec,
    ) -> Layer:
        """Of the layer's group, which is asked what the operators ask of `Support`."""
        part = part_of(meta, spec)
        support, name = part.backend.support, part.backend.name
        reasons = support.reasons_against(spec, spec.block_size_of(kv_cache), kv_cache.device)
        if options.lse is not None and not support.lse:
            reasons.append("it cannot return the log-sum-exp; call attention()")
        if reasons:
            raise ValueError(f"backend {name} cannot run this layer: {'; '.join(reasons)}")
        if isinstance(options, LatentOptions):
            return part.latent_layer(q, kv_cache, options).of_part(part)
        return part.layer(q, kv_cache, options).of_part(part)


def part_of(meta: AttentionMetadata, spec: AttentionSpec) -> AttentionMetadata:
    """The metadata of the group that has layers of geometry `spec`.

    Raises:
        ValueError: the builder was not given such a layer.
    """
    part = meta.planned(spec)
    if part is None:
        raise ValueError(
            f"layer must be one that the builder of backend {meta.backend.name} was given, "
            f"got {spec}; supported: {'; '.join(map(str, meta.plans))}"
        )
    return part


def runs_on(meta: AttentionMetadata, spec: AttentionSpec) -> AttentionBackend:
    """Which backend attends for a layer of geometry `spec` in this batch.

    Of AUTO, the one it chose for the batch; of a grouped backend, that of the layer's group. With
    `attention_chunk_size` the whole batch's metadata, from which its virtual batches are taken, or
    those already.

    Raises:
        ValueError: the builder was not given such a layer.
    """
    chunk = spec.attention_chunk_size
    if chunk is not None:
        meta = meta.views.chunked.get(chunk, meta)
        spec = dataclasses.replace(spec, attention_chunk_size=None)
    return part_of(meta, spec).backend if isinstance(meta.backend, GroupedBackend) else meta.backend


def captures(
    meta: AttentionMetadata,
    options: AttentionOptions | LatentOptions,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
) -> AttentionBackend:
    """`runs_on` for a call of `Backend.forward`: its `support.cudagraph` decides the capture."""
    if isinstance(options, LatentOptions):
        return runs_on(meta, latent_spec(q, kv_cache, options, meta.common.causal))
    return runs_on(meta, options.spec(q, kv_cache, meta.common.causal))
