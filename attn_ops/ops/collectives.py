"""Operators by which the ranks of a split model exchange rows.

A group is given by its name, as `torch.distributed` knows it, so that graphs and their keys hold
text. GPUs of one host reduce by memory that all ranks can read (PyTorch's symmetric memory), which
is allocated at the first call, so before any capture; anything else goes by the group's backend.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist

from attn_ops.ops.library import operator


def _group(name: str) -> Any:
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def _like_reduced(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * _group(group).size()))


ONE_SHOT_BYTES = 64 << 10
"""Up to which each rank reads all that the others have; above, it sums a part for all of them.

On two H200 one shot takes 6.4, 7.0 and 9.5 us for 8, 64 and 512 KB, two shots 6.3, 7.1 and 7.6, and
NCCL 12.6, 13.3 and 15.5.
"""

MOST_BYTES = 32 << 20
"""Of a tensor that is reduced so."""


@operator(fake=_like_reduced)
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of every rank's x, of one shape and dtype: the same bits on all ranks."""
    by_memory = x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and x.nbytes % 16 == 0
    if by_memory and 0 < x.nbytes <= MOST_BYTES:
        shared = _shared_memory(group, x.device)
        if shared is not None:
            return _reduced_by_memory(x.contiguous(), shared, group)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group))
    return total


def _reduced_by_memory(x: torch.Tensor, shared: torch.Tensor, group: str) -> torch.Tensor:
    place = shared[: x.nbytes].view(x.dtype).view(x.shape)
    if x.nbytes <= ONE_SHOT_BYTES:
        return torch.ops.symm_mem.one_shot_all_reduce_copy(place, x, "sum", group)
    place.copy_(x)
    out = torch.empty_like(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(place, "sum", group, out)


# Cached: allocated once; captured graphs hold its address.
@functools.cache
def _shared_memory(group: str, device: torch.device) -> torch.Tensor | None:
    """Bytes that all ranks of the group can read; None: some rank's GPU cannot read the others'."""
    import torch.distributed._symmetric_memory as symmetric

    shared = None
    try:
        shared = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(shared, group)  # pyright: ignore[reportArgumentType]
        can_read = torch.ones((), device=device)
    except RuntimeError:
        can_read = torch.zeros((), device=device)
    dist.all_reduce(can_read, dist.ReduceOp.MIN, group=_group(group))  # all ranks go one way
    return shared if bool(can_read) else None


@operator(fake=_like_gathered)
def all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    """Every rank's x [..., M], one after the other: [..., M * ranks]."""
    ranks = _group(group)
    like = torch.contiguous_format
    parts = [torch.empty_like(x, memory_format=like) for _ in range(ranks.size())]
    dist.all_gather(parts, x.contiguous(), group=ranks)
    return torch.cat(parts, dim=-1)
