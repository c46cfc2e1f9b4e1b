"""Operators by which the ranks of a split model exchange rows.

A group is given by its name, as `torch.distributed` knows it, so that graphs and their keys hold
text.
"""

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


@operator(fake=_like_reduced)
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of every rank's x, of one shape and dtype: the same bits on all ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group))
    return total


@operator(fake=_like_gathered)
def all_gather(x: torch.Tensor, group: str) -> torch.Tensor:
    """Every rank's x [..., M], one after the other: [..., M * ranks]."""
    ranks = _group(group)
    like = torch.contiguous_format
    parts = [torch.empty_like(x, memory_format=like) for _ in range(ranks.size())]
    dist.all_gather(parts, x.contiguous(), group=ranks)
    return torch.cat(parts, dim=-1)
