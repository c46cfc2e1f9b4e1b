"""Requests meet nowhere: NaN or inf in one's keys and values leaves the others' rows as they are.

A mask is not enough: its weights are zeros, and 0 times NaN is NaN.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from attn_ops.backends.base import Backend
from attn_ops.metadata import AttentionMetadata
from attn_ops.ops.varlen import varlen_attention, varlen_metadata
from attn_ops.testing import latent, rules
from attn_ops.testing.calls import Case, make_case
from attn_ops.testing.differences import expect
from attn_ops.testing.features import FEATURES, LENGTHS
from attn_ops.testing.latent_calls import LatentCase

POISON = float("nan"), float("inf")
"""Of requests 1 and 3."""

SHARED = 2
"""Blocks that the requests of a cascade begin with."""


def requests_apart(backend: Backend, device: str, batch: str, feature: str) -> None:
    support, asked = backend.support, FEATURES[feature]
    if asked.declared(support):
        spec = rules.plain_spec(support, **asked.spec)
        size = rules.block_size_of(support)
        case = make_case(backend, spec, LENGTHS[batch], asked, size, device=device)
        _check_cache(case, rules.attend)


def requests_of_a_cascade_apart(backend: Backend, device: str) -> None:
    """What follows a shared prefix is a request's own."""
    support, size = backend.support, rules.block_size_of(backend.support)
    if support.non_causal and support.lse:
        lengths = ([1, 1, 9, 4], [SHARED * size + n for n in (1, 33, 9, 40)])
        arguments = (backend, rules.plain_spec(support), lengths, FEATURES["plain"], size)
        case = make_case(*arguments, device=device, shared_prefix=SHARED)
        # FlashAttention's log-sum-exp of a row of NaN is -inf, so a merge leaves that part out.
        _check_cache(case, rules.attend, SHARED * size, stays=False)


def latent_requests_apart(backend: Backend, device: str, batch: str) -> None:
    _check_cache(latent.plain_case(backend, device, latent.LENGTHS[batch]), latent.attend)


def rows_apart_without_a_cache(backend: Backend, device: str) -> None:
    if backend.varlen is None:
        return
    lengths, spec = [3, 20, 1, 40, 2], rules.plain_spec(backend.support)
    meta = varlen_metadata(lengths, spec, device, backend=backend.name)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(sum(lengths), heads, spec.head_size, generator=generator).to(spec.dtype)
        for heads in (4, 2, 2)
    )

    def attend() -> torch.Tensor:
        return varlen_attention(q.to(device), k.to(device), v.to(device), meta, 0.3)

    want = attend()
    for x in (k, v):
        x[3:23], x[24:64] = POISON
    _check_apart(attend(), want, meta)


def _check_cache(
    case: Case | LatentCase,
    attend: Callable[[Any], torch.Tensor],
    first: int = 0,
    *,
    stays: bool = True,
) -> None:
    """Poison the cache of every second request, from its token `first` on."""
    cache, common, block_size = case.kv_cache.clone(), case.meta.common, case.meta.block_size
    requests = list(zip(common.block_table_tensor, common.seq_lens.tolist(), strict=True))
    for (table, length), value in zip(requests[1::2], POISON, strict=False):
        position = torch.arange(first, length, device=cache.device)
        blocks, offsets = table[position // block_size].long(), position % block_size
        # [B, K, H] is a block of keys, and one of values; [B, Lkv + R] is one of latents.
        for part in (cache[:, 0], cache[:, 1]) if cache.dim() == 5 else (cache,):
            part[blocks, offsets] = value
    out = attend(dataclasses.replace(case, kv_cache=cache))
    _check_apart(out, attend(case), case.meta, stays=stays)


def _check_apart(
    out: torch.Tensor, want: torch.Tensor, meta: AttentionMetadata, *, stays: bool = True
) -> None:
    """Raise unless requests 0, 2, ... have the rows of `want`; others have NaN, if it `stays`."""
    starts = meta.common.query_start_loc.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        if request % 2 and stays:
            hidden = bool(out[begin:end].isfinite().any())
            expect(not hidden, f"NaN or inf of request {request} must reach its own rows")
        elif not request % 2:
            same = torch.equal(out[begin:end], want[begin:end])
            expect(same, f"NaN or inf of another request reached request {request}")
