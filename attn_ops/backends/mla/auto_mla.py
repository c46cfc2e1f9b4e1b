"""AUTO_MLA: the faster of two backends for each batch, on GPUs where both were measured.

| batch | backend |
|---|---|
| at least 128 requests, at most 16 heads | TRITON_MLA |
| any other | FLASH_ATTN_MLA |
| any, with an FP8 cache | TRITON_MLA, which alone takes it |

On Hopper GPUs alone (sm_90). TRITON_MLA's decode took 78 us at 256 requests x 1,024 tokens and 16
heads, where FA3 took 97; at 64 x 8,192 178 and 153, at 128 heads twice as long as FA3
(docs/performance.md). A batch's metadata names the backend that was chosen for it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.backends import auto
from attn_ops.backends.base import Backend, Support
from attn_ops.backends.mla import flash_attn_mla, triton_mla
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import AttentionSpec, CommonAttentionMetadata

MANY, OTHER = "TRITON_MLA", "FLASH_ATTN_MLA"

MANY_REQUESTS = 128
"""Requests from which TRITON_MLA is faster."""

FEW_HEADS = 16
"""Heads up to which it is."""


def choose(specs: Sequence[AttentionSpec], num_reqs: int) -> str:
    """Name of the backend for a batch, from what a captured graph may freeze."""
    if any(spec.kv_cache_dtype != "auto" for spec in specs):
        return MANY
    few_heads = all(spec.num_heads <= FEW_HEADS for spec in specs)
    return MANY if few_heads and num_reqs >= MANY_REQUESTS else OTHER


class AutoMLAMetadataBuilder(auto.AutoMetadataBuilder):
    """A builder of each backend; every batch goes to one of them."""

    cudagraph_support = triton_mla.BACKEND.support.cudagraph

    def __init__(
        self,
        backend: Backend,
        specs: Sequence[AttentionSpec],
        block_size: int,
        device: torch.device | str,
        *,
        workspace: MLAWorkspace | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(backend, specs, block_size, device, **keywords)
        self.workspace = workspace or MLAWorkspace(specs, device=device)
        for builder in self._builders.values():
            assert isinstance(builder, MLAMetadataBuilder), "parts are backends of latent attention"
            builder.workspace = self.workspace

    def used(self) -> set[str]:
        return {choose(self.specs, 1), choose(self.specs, MANY_REQUESTS)}

    def chosen(self, common: CommonAttentionMetadata) -> str:
        return choose(self.specs, common.num_reqs)


class AutoMLABackend(Backend):
    """Its parts may know more reasons than their declarations."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        if reasons or spec.latent is None:
            return reasons
        parts = (flash_attn_mla.BACKEND, triton_mla.BACKEND)
        used = {choose((spec,), num_reqs) for num_reqs in (1, MANY_REQUESTS)}
        return [
            f"{part.name}: {reason}"
            for part in parts
            if part.name in used
            for reason in part.reasons_against(spec, block_size, device)
        ]


def unavailable() -> str | None:
    for part in (triton_mla.BACKEND, flash_attn_mla.BACKEND):
        if (reason := part.unavailable()) is not None:
            return f"{part.name}: {reason}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "the GPU must be sm_90, where both backends were measured"
    return None


def _support() -> Support:
    """What both can do, and FP8 caches, of which TRITON_MLA takes all batches."""
    fp8 = triton_mla.BACKEND.support.kv_cache_dtypes
    shared = auto.both(flash_attn_mla.BACKEND.support, triton_mla.BACKEND.support)
    sizes = flash_attn_mla.BACKEND.support.latent_sizes
    return dataclasses.replace(shared, kv_cache_dtypes=fp8, latent_sizes=sizes)


BACKEND = AutoMLABackend(
    name="AUTO_MLA",
    support=_support(),
    builder=AutoMLAMetadataBuilder,
    forward=auto.forward,
    unavailable=unavailable,
)
