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
import functools
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.backends.auto import unavailable
from attn_ops.backends.base import Backend
from attn_ops.backends.composite import (
    CompositeBackend,
    CompositeMetadataBuilder,
    Sizes,
    builder_for,
    forward,
)
from attn_ops.backends.mla import flash_attn_mla, triton_mla
from attn_ops.backends.mla.builder import MLAMetadataBuilder
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import AttentionSpec

TRITON_MLA, FLASH_ATTN_MLA = triton_mla.BACKEND, flash_attn_mla.BACKEND

FEW_ROWS = 16
"""Heads times query tokens of a request up to which TRITON_MLA is faster."""

FEW_REQUESTS = 2
"""Requests of single tokens up to which it is faster with more heads, if they are short."""

FEW_KEYS = 8192
"""Tokens that they may have together."""


def rule(spec: AttentionSpec, sizes: Sizes) -> Backend:
    """The table above."""
    num_reqs, max_query_len, max_seq_len = sizes
    few_rows = spec.num_heads * max_query_len <= FEW_ROWS
    short = num_reqs <= FEW_REQUESTS and num_reqs * max_seq_len <= FEW_KEYS
    if spec.kv_cache_dtype != "auto" or few_rows or (max_query_len <= 1 and short):
        return TRITON_MLA
    return FLASH_ATTN_MLA


class AutoMLAMetadataBuilder(CompositeMetadataBuilder):
    """Its parts gather latents in one workspace; see `MLAMetadataBuilder`."""

    def __init__(
        self,
        backend: CompositeBackend,
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

    def profile_run(self, max_num_tokens: int) -> int:
        return self.workspace.reserve(max_num_tokens)


PARTS = (TRITON_MLA, FLASH_ATTN_MLA)

BACKEND = CompositeBackend(
    name="AUTO_MLA",
    support=dataclasses.replace(
        FLASH_ATTN_MLA.support, kv_cache_dtypes=TRITON_MLA.support.kv_cache_dtypes
    ),
    builder=builder_for(PARTS, AutoMLAMetadataBuilder),
    forward=forward,
    unavailable=functools.partial(unavailable, PARTS),
    parts=PARTS,
    rule=rule,
)
