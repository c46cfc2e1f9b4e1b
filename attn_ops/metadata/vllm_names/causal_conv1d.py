"""Which program of a causal convolution (Mamba) works on which part of which prefill."""

from typing import Any

import numpy as np
import torch

from attn_ops.metadata.checks import check_apart, check_tensor
from attn_ops.metadata.positions import PAD_SLOT_ID

BLOCK_M = 8
"""Tokens of one program."""

MIN_PROGRAMS = 1024


def compute_causal_conv1d_metadata(
    query_start_loc_p: torch.Tensor,
    *,
    query_start_loc_cpu: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[dict[int, dict[str, Any]], torch.Tensor, torch.Tensor]:
    """Programs of BLOCK_M tokens each for a batch of prefills.

    Args:
        query_start_loc_p: [S+1] int32, first row of each prefill, cumulative.
        query_start_loc_cpu: its CPU mirror; needed if it is on a device, which is not read.
        out: batch_ptr and token_chunk_offset_ptr to write, int32, at least as long as there are
            programs; None allocates max(1024, programs) * 2 each.

    Returns:
        nums_dict: for BLOCK_M, on the CPU: nums [S] (programs a prefill), tot (all), mlist [tot]
            int64 (prefill of each program), mlist_len, offsetlist [tot] int32 (which chunk of it),
            and the two tensors below.
        batch_ptr, token_chunk_offset_ptr: int32 on the device: mlist and offsetlist, PAD_SLOT_ID
            behind them.

    Raises:
        ValueError: the mirror is needed and not there, it falls, or `out` does not fit.
    """
    device = query_start_loc_p.device
    if query_start_loc_cpu is None and device.type == "cpu":
        query_start_loc_cpu = query_start_loc_p
    if query_start_loc_cpu is None:
        raise ValueError(f"query_start_loc_cpu must be given for a batch on {device}, got None")
    query = _query_lens(query_start_loc_cpu, query_start_loc_p)
    nums = -(-query // BLOCK_M)
    count = nums.numpy()
    mlist = np.repeat(np.arange(count.size), count)
    offset = np.arange(mlist.size) - np.repeat(np.cumsum(count) - count, count)
    size = max(MIN_PROGRAMS, mlist.size) * 2
    if out is None:
        packed = torch.empty(2, size, dtype=torch.int32, device=device)
        out = (packed[0], packed[1])
    names = ("batch_ptr", "token_chunk_offset_ptr")
    for name, target in zip(names, out, strict=True):
        check_tensor(f"out's {name}", target, (torch.int32,), (None,), device)
        if target.shape[0] < mlist.size:
            raise ValueError(
                f"out's {name} must have at least {mlist.size} entries, got {target.shape[0]}"
            )
    check_apart(**dict(zip(names, out, strict=True)))
    for target, values in zip(out, (mlist, offset), strict=True):
        target.fill_(PAD_SLOT_ID)
        target[: mlist.size].copy_(torch.from_numpy(values.astype(np.int32)), non_blocking=True)
    programs = {
        "nums": nums,
        "tot": int(mlist.size),
        "mlist": torch.from_numpy(mlist),
        "mlist_len": int(mlist.size),
        "offsetlist": torch.from_numpy(offset.astype(np.int32)),
        "batch_ptr": out[0],
        "token_chunk_offset_ptr": out[1],
    }
    return {BLOCK_M: programs}, *out


def _query_lens(start_cpu: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[S] int32, CPU."""
    if start_cpu.shape != start.shape:
        raise ValueError(
            f"query_start_loc_cpu must have shape {list(start.shape)}, got {list(start_cpu.shape)}"
        )
    query = start_cpu.diff()
    if (query < 0).any():
        raise ValueError(f"query_start_loc_p must never fall, got {start_cpu.tolist()}")
    return query
