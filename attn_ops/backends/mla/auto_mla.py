"""AUTO_MLA: the faster of two backends for each batch, on GPUs where both were measured.

| batch | backend |
|---|---|
| at most 16 rows a request: heads times query tokens | TRITON_MLA |
| single tokens of 1 or 2 requests, at most 8,192 keys together | TRITON_MLA |
| any other | FLASH_ATTN_MLA |
| any, with an FP8 cache | TRITON_MLA, which alone takes it |

On Hopper GPUs alone (sm_90). Of single tokens at 16 heads TRITON_MLA took 0.53 to 0.96 of the time
of FA3, at 32 x 65,536 1.03; at 32 to 128 heads 0.66 to 0.97 for few short requests, up to 2.4 for
others; of prompts more (one H200, 2026-11-23). A captured step goes by the length that its
requests may reach. A batch's metadata names the backend that was chosen for it.
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

FEW, OTHER = "TRITON_MLA", "FLASH_ATTN_MLA"

FEW_ROWS = 16
"""Heads times query tokens of a request up to which TRITON_MLA is faster."""

FEW_REQUESTS = 2
"""Requests of single tokens up to which it is faster with more heads, if they are short."""

FEW_KEYS = 8192
"""Tokens that they may have together."""


def choose(
    specs: Sequence[AttentionSpec], num_reqs: int, max_query_len: int, max_seq_len: int
) -> str:
    """Name of the backend for a batch, from what a captured graph may freeze."""
    if any(spec.kv_cache_dtype != "auto" for spec in specs):
        return FEW
    few_rows = all(spec.num_heads * max_query_len <= FEW_ROWS for spec in specs)
    short = num_reqs <= FEW_REQUESTS and num_reqs * max_seq_len <= FEW_KEYS
    return FEW if few_rows or (max_query_len <= 1 and short) else OTHER


def _used(specs: Sequence[AttentionSpec]) -> set[str]:
    """Names of the backends that batches may go to."""
    fp8 = any(spec.kv_cache_dtype != "auto" for spec in specs)
    return {FEW} if fp8 else {FEW, OTHER}


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
        return _used(self.specs)

    def chosen(self, common: CommonAttentionMetadata) -> str:
        return choose(self.specs, common.num_reqs, common.max_query_len, common.max_seq_len)


class AutoMLABackend(Backend):
    """Its parts may know more reasons than their declarations."""

    def reasons_against(
        self, spec: AttentionSpec, block_size: int, device: torch.device
    ) -> list[str]:
        reasons = super().reasons_against(spec, block_size, device)
        if reasons or spec.latent is None:
            return reasons
        parts = (flash_attn_mla.BACKEND, triton_mla.BACKEND)
        used = _used((spec,))
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
