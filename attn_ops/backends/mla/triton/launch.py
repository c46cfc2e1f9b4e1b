"""How the decode kernel of latent attention is launched: its constants, and ranges of keys.

S requests, N query heads, M rows of a program, R ranges of a request's keys.
"""

import functools
from typing import NamedTuple

import torch

from attn_ops.integers import cdiv, next_power_of_2

MAX_SPLITS = 128
"""Ranges of keys of one request."""

MIN_KEYS = 48
"""Of a range: shorter ones cost more in the combining kernel than they save."""

RANGE_KEYS = 128
"""Keys that could be attended in the time a program takes besides: its start, end and parts."""

MAX_WAVES = 4
"""Of programs: how often more ranges are weighed against a last wave that leaves SMs idle."""


class DecodeLaunch(NamedTuple):
    """Constants of a launch of the decode kernel."""

    rows: int  # M: query rows of a program, each one head of a token
    keys: int  # of a tile
    num_warps: int
    num_stages: int
    swap: bool = False  # keys are the rows of the products
    programs_per_sm: int = 2  # that run at a time
    chains: int = 2  # products of a key that do not wait for each other; 1 takes fewer registers


def decode_launch(
    num_rows: int, dtype: torch.dtype, fp8: bool, latent: int, small: bool = False
) -> DecodeLaunch:
    """For requests of `num_rows` rows each; `small`: with tiles of few keys.

    Up to 16 rows, tiles of 64 keys are within 2.2 percent of the best form on average, with one
    program an SM. More requests than SMs are faster with two (76.9 for 82.5 us at 256 x 1,024; one
    H200, 2026-11-23).

    64 rows need two warp groups, as their result fills the registers of one. Triton gives both the
    same scores to compute, because a product that feeds another has all warps along its rows. That
    bounds requests of many heads at about 0.4 of the tensor cores' rate (one H200, 2026-11-22:
    0.34 at 64 requests x 8,192 tokens, 128 heads, `python -m benchmarks.mla decode`).
    """
    rows = min(max(next_power_of_2(num_rows), 16), 64)
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return DecodeLaunch(16, 16, 8, 1, programs_per_sm=1)
    if rows <= 32:
        if latent <= 256:
            return DecodeLaunch(rows, 32, 4, 4)
        if fp8 and rows == 32:  # four warps would spill
            return DecodeLaunch(rows, 32, 8, 3, programs_per_sm=1)
        if fp8 or rows == 32 or small or latent > 512:
            return DecodeLaunch(rows, 32, 4, 2 if fp8 else 3)
        return DecodeLaunch(rows, 64, 4, 3, programs_per_sm=1)
    if latent <= 256:
        return DecodeLaunch(rows, 64, 8, 2, programs_per_sm=1, chains=1)
    return DecodeLaunch(rows, 32 if fp8 else 64, 8, 2, programs_per_sm=1, chains=1)


# Cached: a property of the device, asked by each launch.
@functools.cache
def has_room(device: torch.device) -> bool:
    """Whether a program may take the shared memory of tiles of 64 keys: 168 KB at 512 + 64."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 170_000


# Cached: every layer of a step asks the same.
@functools.lru_cache(maxsize=256)
def choose_num_splits(num_programs: int, max_keys: int, slots: int) -> int:
    """Ranges per request, from host values that a captured graph may freeze.

    The ranges of which the programs, in waves of `slots`, take least time: a wave takes as long as
    a range and RANGE_KEYS more.

    Args:
        num_programs: programs without splitting.
        max_keys: most keys that a query sees, or an upper bound.
        slots: programs that run at a time on the device.
    """
    programs = max(num_programs, 1)
    most = max(1, min(cdiv(max_keys, MIN_KEYS), MAX_SPLITS))
    best, best_cost = 1, cdiv(programs, slots) * (max_keys + RANGE_KEYS)
    for waves in range(1, MAX_WAVES + 1):
        splits = min(waves * slots // programs, most)
        if splits <= 1:
            continue
        cost = cdiv(programs * splits, slots) * (cdiv(max_keys, splits) + RANGE_KEYS)
        if cost < best_cost:
            best, best_cost = splits, cost
    return best
