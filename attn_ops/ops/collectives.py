"""Operators by which the ranks of a split model exchange rows.

A group is given by its name, as `torch.distributed` knows it, so that graphs and their keys hold
text. GPUs of one host reduce by memory that all ranks can read (PyTorch's symmetric memory), which
is allocated when a model's parts are taken, so before anything compiles or is captured; anything
else goes by the group's backend.
"""

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist

from attn_ops.ops.library import operator

_LOG = logging.getLogger(__name__)


def _group(name: str) -> Any:
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def _like_reduced(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * _group(group).size()))


@operator(fake=_like_reduced)
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of every rank's x, of one shape and dtype: the same bits on all ranks."""
    if by_kernels(x, group) and x.numel():
        from attn_ops.ops.triton.collectives import launch_all_reduce

        total = launch_all_reduce(x.contiguous().view(-1), shared_memory(group, x.device))
        return total.view(x.shape)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group))
    return total


def by_kernels(x: torch.Tensor, group: str) -> bool:
    """Whether kernels of ours sum such an x, in the order of ranks for any number of rows."""
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return x.is_cuda and x.dtype in kinds and shared_memory(group, x.device) is not None


# Cached: allocated once; captured graphs hold its address.
@functools.cache
def shared_memory(group: str, device: torch.device) -> Any:
    """What all ranks of the group can read and write; None: some rank's GPU cannot."""
    import torch.distributed._symmetric_memory as symmetric

    from attn_ops.ops.triton.collectives import PROGRAMS, Shared, num_bytes

    ranks = _group(group)
    can_share, found = torch.zeros((), device=device), None
    try:
        held = symmetric.empty(num_bytes(ranks.size()), dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(held, group)  # pyright: ignore[reportArgumentType]
        bases = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        epochs = torch.zeros(2, PROGRAMS, dtype=torch.int64, device=device)
        found = Shared(bases, (epochs[0], epochs[1]), ranks.rank(), (held, handle))
        can_share.fill_(1)
    except RuntimeError as error:
        _LOG.warning("ranks share no memory, sums go by the group's backend: %s", error)
    # All ranks go one way, after every block is zero.
    dist.all_reduce(can_share, dist.ReduceOp.MIN, group=ranks)
    return found if bool(can_share) else None


@operator(fake=_like_gathered)
def all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    """Every rank's x [..., M], one after the other: [..., M * ranks]."""
    ranks = _group(group)
    like = torch.contiguous_format
    parts = [torch.empty_like(x, memory_format=like) for _ in range(ranks.size())]
    dist.all_gather(parts, x.contiguous(), group=ranks)
    return torch.cat(parts, dim=-1)
