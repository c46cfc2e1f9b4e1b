"""How the kernels of TRITON_FIXED are launched.

T rows, S requests, N query heads, K kv heads, H head size, P blocks, B block size, U units.
"""

import math
from typing import NamedTuple

import torch

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.fixed_kernels import (
    LATE,
    UNIT,
    fixed_kernel,
    merge_units_kernel,
)
from attn_ops.backends.triton.tiles import (
    num_sms,
    option_arguments,
    padded_head_size,
    readable,
    widened,
)
from attn_ops.early_launch.triton.launch import early_launch, quick
from attn_ops.integers import cdiv, next_power_of_2
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.ops.products.ordered_mm import new_rows

PROGRAMS_PER_SM = 4
"""Wanted at least: where rows and heads give fewer, programs share a row's units."""

ROWS_OF_FP8 = 64
"""Rows from which Hopper multiplies a converted tile of FP8 by one instruction; its other one takes
keys in another order, and 1 of 100,000 results differs (H100, Triton 3.6, 2026-11-26)."""

MAX_PARTS_BYTES = 256 << 20
"""Of units that wait to be merged; beyond, one program computes all of a row."""


class FixedConstants(NamedTuple):
    """Constants of a launch. `keys` is part of the result; the others are not."""

    keys: int  # of a tile
    rows: int  # most rows of a program
    num_warps: int  # with all rows
    few_warps: int  # with fewer
    num_stages: int


def fixed_constants(padded_head_size: int, dtype: torch.dtype, fp8: bool) -> FixedConstants:
    """By what a layer is: a batch must not choose the tile."""
    if dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        return FixedConstants(16, 16 if padded_head_size > 128 else 32, 8, 8, 1)
    if padded_head_size > 256:
        return FixedConstants(16, 64, 8, 4, 2)
    if padded_head_size > 128:
        return FixedConstants(32, 64, 4, 4, 2)
    return FixedConstants(64, 128, 8, 4, 3)


def num_units(num_keys: int) -> int:
    """Units of a sequence."""
    early, late = min(num_keys, LATE.value), max(num_keys - LATE.value, 0)
    return cdiv(early, UNIT.value) + cdiv(late, 2 * UNIT.value)


def fixed_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    constants: FixedConstants | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [P, 2, B, K, H] -> [T, N, H] contiguous.

    Where many requests have few rows beside one with many, a launch of its own computes those: a
    program made for many rows would be empty but for one.

    Args:
        constants: override the choice.
        num_splits: programs that share a row's units, likewise.
    """
    (num_rows, num_heads, head_size), num_kv_heads = q.shape, kv_cache.shape[3]
    group, padded = num_heads // num_kv_heads, padded_head_size(head_size)
    fp8 = options.kv_cache_dtype != "auto"
    chosen = constants or fixed_constants(padded, q.dtype, fp8)
    heads = min(group, chosen.rows)
    fewest = ROWS_OF_FP8 if fp8 and q.dtype != torch.float32 else 16
    few = max(fewest, next_power_of_2(heads))
    block_m = min(chosen.rows, max(few, next_power_of_2(common.max_query_len * heads)))
    num_head_tiles = num_kv_heads * cdiv(group, heads)
    units, sms = num_units(common.max_seq_len), num_sms(q.device)
    apart = num_splits is None and block_m > few and num_head_tiles * common.num_reqs >= sms
    if num_splits is None:
        needed_programs = num_head_tiles * max(num_rows * heads // block_m, common.num_reqs, 1)
        num_splits = PROGRAMS_PER_SM * sms // needed_programs
    num_splits = max(1, min(num_splits, units))
    if 4 * units * q.numel() > MAX_PARTS_BYTES:
        num_splits = 1
    split = num_splits > 1
    out = new_rows(num_rows, num_heads * head_size, q).view(q.shape)
    part, part_max, part_sum = _parts(out, units) if split else (out, out, out)
    (score_scale, soft_cap, window, _, sinks, k_scale, v_scale, _), flags = option_arguments(
        options, unused=out
    )
    for name in ("HAS_ALIBI", "HAS_LSE"):
        assert not flags.pop(name), f"{name} is not declared"
    changes_scores = flags["HAS_SOFT_CAP"] or flags["HAS_K_SCALE"]
    table = common.block_table_tensor

    def launch(block_m: int, num_splits: int, is_few: bool) -> None:
        num_programs = num_head_tiles * (num_rows // (block_m // heads) + common.num_reqs + 1)
        parts = (part, part_max, part_sum) if num_splits > 1 else (out, out, out)
        quick(fixed_kernel, (num_programs, num_splits))(
            *parts, q, readable(kv_cache, options),
            common.query_start_loc, common.seq_lens, table,
            *q.stride()[:2], *kv_cache.stride()[:4], table.stride(0),
            common.num_reqs, num_rows, units, score_scale, soft_cap, window, sinks, k_scale,
            v_scale,
            NUM_HEADS=num_heads,
            GROUP=group,
            HEADS=heads,
            HEAD_SIZE=head_size,
            PADDED_HEAD_SIZE=padded,
            BLOCK_SIZE=kv_cache.shape[2],
            BLOCK_M=block_m,
            TILE=chosen.keys,
            VECTOR=math.gcd(16, *kv_cache.stride()[:4]),
            FUSED=options.scale > 0 and not changes_scores,
            WIDEN=widened(q.dtype),
            SPLIT=num_splits > 1,
            FEW=few // heads if apart else 0,
            IS_FEW=is_few,
            num_warps=chosen.num_warps if block_m == chosen.rows else chosen.few_warps,
            num_stages=chosen.num_stages,
            enable_fp_fusion=False,
            **flags,
            **early_launch(q.device),
        )  # fmt: skip

    launch(block_m, num_splits, is_few=False)
    if split:
        quick(merge_units_kernel, (num_rows, num_heads))(
            out, part, part_max, part_sum, common.query_start_loc, common.seq_lens,
            common.num_reqs, num_rows, units, window, sinks, v_scale,
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            PADDED_HEAD_SIZE=padded,
            **{name: flags[name] for name in ("HAS_WINDOW", "HAS_SINKS", "HAS_V_SCALE")},
            num_warps=max(padded // 128, 1),
            enable_fp_fusion=False,
            **early_launch(q.device),
        )  # fmt: skip
    if apart:  # behind the merge, which has nothing of these rows
        launch(few, 1, is_few=True)
    return out


def _parts(out: torch.Tensor, units: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """part [U, T, N, H], its maxima and its sums [U, T, N], float32."""
    shape, place = (units, *out.shape), {"dtype": torch.float32, "device": out.device}
    part = torch.empty(shape, **place)
    return part, torch.empty(shape[:-1], **place), torch.empty(shape[:-1], **place)
