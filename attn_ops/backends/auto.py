"""AUTO: the fastest of two backends for each batch, on GPUs where both were measured.

| batch | backend |
|---|---|
| single-token queries | TRITON |
| any other, and a prefix that decodes share | FLASH_ATTN |
| any, with an FP8 cache | TRITON: FA3 would round q to FP8 as well |

On Hopper GPUs alone (sm_90), where FA3 runs: there TRITON's decode takes 0.62 to 1.00 of FA3's
time, and FA3's prefill 0.72 to 0.80 of TRITON's (one H200, 2026-11-21). AUTO supports what both do.
A batch's metadata names the backend that was chosen for it, so `meta.backend` is never AUTO.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.backends.base import AttentionOptions, Backend, Support
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    LogitsRows,
)

DECODE, OTHER = "TRITON", "FLASH_ATTN"


def choose(specs: tuple[AttentionSpec, ...], max_query_len: int) -> str:
    """Name of the backend for a batch, from what a captured graph may freeze."""
    plain = all(spec.kv_cache_dtype == "auto" for spec in specs)
    return OTHER if plain and max_query_len > 1 else DECODE


def _part(name: str) -> Backend:
    from attn_ops.backends.registry import get_backend

    return get_backend(name)


class AutoMetadataBuilder(AttentionMetadataBuilder):
    """A builder of each backend; every batch goes to one of them."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    takes_windows = True

    def used(self) -> set[str]:
        """Names of the backends that batches may go to."""
        return {choose(self.specs, 1), choose(self.specs, 2)}

    def chosen(self, common: CommonAttentionMetadata) -> str:
        """Name of the backend for a batch, from what a captured graph may freeze."""
        return choose(self.specs, common.max_query_len)

    def __init__(
        self,
        backend: Backend,
        specs: Sequence[AttentionSpec],
        block_size: int,
        device: torch.device | str,
        **keywords: Any,
    ) -> None:
        super().__init__(backend, specs, block_size, device, **keywords)
        self._builders = {
            name: _part(name).builder(_part(name), specs, block_size, device, **keywords)
            for name in sorted(self.used())
        }
        for builder in self._builders.values():
            builder.prefix_builder = self._builders.get(OTHER)

    def _builder(self, common: CommonAttentionMetadata) -> AttentionMetadataBuilder:
        return self._builders[self.chosen(common)]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        builder = self._builder(common_attn_metadata)
        return self._own(builder.build(common_prefix_len, common_attn_metadata, fast_build))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        builder = self._builder(common_attn_metadata)
        return self._own(builder.build_for_cudagraph_capture(common_attn_metadata))

    def build_cascade(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        shared_lens: torch.Tensor,
        group_starts: torch.Tensor,
    ) -> AttentionMetadata:
        builder = self._builder(common_attn_metadata)
        return self._own(builder.build_cascade(common_attn_metadata, shared_lens, group_starts))

    def profile_run(self, max_num_tokens: int) -> int:
        """Of the part that takes most: a batch goes to one of them."""
        return max(b.profile_run(max_num_tokens) for b in self._builders.values())

    def _own(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Logits rows of it are reduced for the backend that is best for few rows."""
        rows = LogitsRows(self.build_logits_rows)
        return metadata.replace(views=dataclasses.replace(metadata.views, logits_rows=rows))


def forward(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions
) -> torch.Tensor:
    """Of the backend that the metadata names."""
    assert meta.backend.name != "AUTO", "AUTO's builder makes metadata of other backends"
    return meta.backend.forward(q, kv_cache, meta, options)


# Cached: asks the device; each selection asks.
@functools.cache
def unavailable() -> str | None:
    for name in (DECODE, OTHER):
        reason = _part(name).unavailable()
        if reason is not None:
            return f"{name}: {reason}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "the GPU must be sm_90, where both backends were measured"
    return None


def both(a: Support, b: Support) -> Support:
    """What two backends can do."""
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(Support):
        mine, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(mine, tuple):
            merged[field.name] = tuple(x for x in mine if x in other)
        elif isinstance(mine, AttentionCGSupport):
            merged[field.name] = min(mine, other, key=lambda level: level.value)
        else:
            merged[field.name] = mine and other
    return Support(**merged)


class AutoBackend(Backend):
    """Its parts may know more reasons than their declarations."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        used = dict.fromkeys(choose((spec,), length) for length in (1, 2))
        return reasons or [
            f"{name}: {reason}"
            for name in used
            for reason in _part(name).reasons_against(spec, block_size, device)
        ]


BACKEND = AutoBackend(
    name="AUTO",
    support=both(_part(OTHER).support, _part(DECODE).support),
    builder=AutoMetadataBuilder,
    forward=forward,
    unavailable=unavailable,
)
