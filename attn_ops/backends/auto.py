"""AUTO: the fastest of two backends for each batch, on GPUs where both were measured.

| batch | backend |
|---|---|
| single-token queries | TRITON |
| any other, and a prefix that decodes share | FLASH_ATTN |
| any, with an FP8 cache | TRITON: FA3 would round q to FP8 as well |

On Hopper GPUs alone (sm_90), where FA3 runs: there TRITON's decode takes 0.62 to 1.00 of FA3's
time, and FA3's prefill 0.72 to 0.80 of TRITON's (one H200, 2026-11-21). AUTO supports what both do.
A batch's metadata names the backend that was chosen for it.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch

from attn_ops.backends.base import Backend
from attn_ops.backends.composite import CompositeBackend, Sizes, builder_for, forward
from attn_ops.backends.registry import get_backend
from attn_ops.metadata import AttentionSpec

TRITON, FLASH_ATTN = get_backend("TRITON"), get_backend("FLASH_ATTN")


def rule(spec: AttentionSpec, sizes: Sizes) -> Backend:
    """The table above."""
    plain = spec.kv_cache_dtype == "auto"
    return FLASH_ATTN if plain and sizes.max_query_len > 1 else TRITON


def unavailable(parts: Sequence[Backend]) -> str | None:
    """Why the faster of several backends cannot be chosen; None: it can."""
    for part in parts:
        if (reason := part.missing()) is not None:
            return f"{part.name}: {reason}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "the GPU must be sm_90, where both backends were measured"
    return None


PARTS = (TRITON, FLASH_ATTN)

BACKEND = CompositeBackend(
    name="AUTO",
    support=dataclasses.replace(FLASH_ATTN.support, quantizes_query=False),
    builder=builder_for(PARTS),
    forward=forward,
    unavailable=functools.partial(unavailable, PARTS),
    parts=PARTS,
    rule=rule,
)
