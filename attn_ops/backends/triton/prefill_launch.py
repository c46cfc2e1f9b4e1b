"""How the prefill kernel is launched: its constants, and where it finds keys.

T rows, S requests, N query heads, K kv heads, G = N // K, H head size, P blocks, B block size.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_ops.backends.base import AttentionOptions
from attn_ops.backends.triton.prefill_keys import DENSE, PAGED, TMA
from attn_ops.backends.triton.prefill_parts import GATHER_ROWS, gather_keys, rows_per_request
from attn_ops.backends.triton.tiles import MAX_SPLITS, num_sms, padded_head_size, readable
from attn_ops.metadata import CommonAttentionMetadata

MAX_SPLIT_ROWS = 64
"""Keys are split if a request's rows, G a query token, are at most so many."""

MIN_TOKENS_PER_SPLIT = 256
"""A shorter range costs more in the combining kernel than it saves."""

PROGRAMS_PER_SM = 4
"""Wanted at least, of programs that split keys."""

MIN_GATHER_QUERIES = 512
"""Query tokens per request from which gathering the keys can pay: it moves each key once."""

MIN_GATHER_PAIRS = 1 << 24
"""Query tokens x keys from which it pays, as its launches take 50 us: at 2048 x 2048 0.50 and not
0.75 of FA3's rate, at 2048 x 16384 0.88 and not 0.74 (one H200, Triton 3.6, 2026-11-21)."""

MIN_GATHER_PAIRS_FP8 = 1 << 22
"""The same for FP8 caches, where it also converts: in place they reach 0.40 of FA3's rate."""

MAX_GATHER_BYTES = 1 << 30
"""Of scratch memory."""


class Launch(NamedTuple):
    """Constants of a launch of the prefill kernel."""

    rows: int  # most rows of a program
    keys: int  # keys of a tile
    num_warps: int  # with all rows; 4 with fewer
    num_stages: int
    heads: int | None = None  # query heads stacked in a program; None: as many as share a kv head
    ahead: bool = True  # block ids are loaded an iteration ahead of their use
    heads_first: bool = False  # order of programs: all heads of some rows before other rows
    gather: bool = False  # keys are gathered into consecutive rows first and read by TMA
    maxnreg: int | None = None  # registers of a thread; None: the compiler's choice
    num_splits: int = 1  # ranges of keys, up to MAX_SPLITS

    def fitted(self, group: int, max_query_len: int) -> tuple[int, int]:
        """(rows, heads) of a program, no larger than the batch needs."""
        heads = min(group, self.heads or group)
        needed = triton.next_power_of_2(max_query_len * heads)
        rows = min(self.rows, max(16, needed))
        return rows, min(heads, rows)

    def constants(self, rows: int) -> dict[str, Any]:
        """The kernel's keyword arguments that do not depend on the batch."""
        registers = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {
            "AHEAD": self.ahead,
            "HEADS_FIRST": self.heads_first,
            "num_warps": self.num_warps if rows == self.rows else 4,
            "num_stages": self.num_stages,
            **registers,
        }


class Keys(NamedTuple):
    """Where a launch finds keys and values."""

    kind: int  # PAGED, DENSE or TMA
    k: torch.Tensor | TensorDescriptor
    v: torch.Tensor | TensorDescriptor
    table: torch.Tensor
    strides: tuple[int, ...]  # the kernel's arguments from stride_block to stride_table
    num_kv_heads: int
    block_size: int = 1


def paged_keys(
    kv_cache: torch.Tensor, common: CommonAttentionMetadata, options: AttentionOptions
) -> Keys:
    """kv_cache [P, 2, B, K, H], read in place."""
    kv = readable(kv_cache, options)
    stride_block, _, stride_token, stride_head, _ = kv.stride()
    table = common.block_table_tensor
    token_and_head = (stride_token, stride_token, stride_head, stride_head)
    strides = (stride_block, *token_and_head, table.stride(0))
    return Keys(PAGED.value, kv[:, 0], kv[:, 1], table, strides, kv.shape[3], kv.shape[2])


def dense_keys(k: torch.Tensor, v: torch.Tensor) -> Keys:
    """k and v [T, K, H], rows as q's."""
    strides = (0, k.stride(0), v.stride(0), k.stride(1), v.stride(1), 0)
    return Keys(DENSE.value, k, v, k, strides, k.shape[1])


def gathered_keys(
    kv_cache: torch.Tensor,
    common: CommonAttentionMetadata,
    options: AttentionOptions,
    dtype: torch.dtype,
    tile: int,
) -> Keys:
    """kv_cache [P, 2, B, K, H], copied in `dtype`, and read `tile` keys at a time."""
    assert GATHER_ROWS % tile == 0, f"keys must divide {GATHER_ROWS}, got {tile}"
    kv_2KLH = gather_keys(readable(kv_cache, options), common, dtype)
    _, num_kv_heads, num_rows, head_size = kv_2KLH.shape
    box = [tile, padded_head_size(head_size)]
    k, v = (
        TensorDescriptor(one_KLH, [num_kv_heads * num_rows, head_size], [head_size, 1], box)
        for one_KLH in kv_2KLH
    )
    strides = (0, 0, 0, num_rows, num_rows, rows_per_request(common))
    return Keys(TMA.value, k, v, common.block_table_tensor, strides, num_kv_heads)


def choose_launch(q: torch.Tensor, cache: torch.Tensor, common: CommonAttentionMetadata) -> Launch:
    """For q [T, N, H] and a cache, or keys, of shape [..., K, H].

    The best of a sweep over 65 forms at head size 128 (one H200, Triton 3.6, 2026-11-21,
    docs/performance.md). Other head sizes are not measured.
    """
    (_, num_heads, head_size), num_kv_heads = q.shape, cache.shape[-2]
    padded = padded_head_size(head_size)
    if padded > 256:  # q alone fills the registers of half as many rows
        large = shared_memory(q.device) >= 132 * 1024
        launch = Launch(64, 16, 8, 2) if large else Launch(32, 16, 8, 1)
        if q.dtype == torch.float32:
            launch = Launch(16, 16, 8, 1)
    elif q.dtype == torch.float32:  # products run as scalar FMAs, unrolled: larger tiles spill
        launch = Launch(32, 32, 4, 1) if padded <= 64 else Launch(32, 16, 8, 1)
    elif padded > 128:
        launch = Launch(128 if shared_memory(q.device) >= 132 * 1024 else 64, 32, 8, 3)
    elif gathers(q, cache, common):
        launch = Launch(64, 64, 4, 3, gather=True)
    else:
        launch = Launch(128, 64, 8, 3, heads_first=True)
    num_splits = choose_num_splits(launch, num_heads // num_kv_heads, num_kv_heads, common, q)
    return launch._replace(num_splits=num_splits)


def choose_num_splits(
    launch: Launch,
    group: int,
    num_kv_heads: int,
    common: CommonAttentionMetadata,
    q: torch.Tensor,
) -> int:
    """Ranges that keys are cut into, from host values that a captured graph may freeze."""
    if common.max_query_len * group > MAX_SPLIT_ROWS:
        return 1
    rows, heads = launch.fitted(group, common.max_query_len)
    row_tiles = max(common.num_reqs, 1) * triton.cdiv(common.max_query_len, rows // heads)
    num_programs = row_tiles * num_kv_heads * triton.cdiv(group, heads)
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms(q.device), num_programs)
    return max(1, min(wanted, triton.cdiv(common.max_seq_len, MIN_TOKENS_PER_SPLIT), MAX_SPLITS))


def gathers(q: torch.Tensor, cache: torch.Tensor, common: CommonAttentionMetadata) -> bool:
    """Whether keys are worth gathering; a captured launch keeps its scratch in the graph's pool."""
    if not has_tma(q.device) or common.num_reqs == 0:
        return False
    num_bytes = 2 * common.num_reqs * rows_per_request(common) * cache.shape[-2:].numel()
    pairs = MIN_GATHER_PAIRS if cache.dtype == q.dtype else MIN_GATHER_PAIRS_FP8
    enough = q.shape[0] >= max(
        MIN_GATHER_QUERIES * common.num_reqs, pairs / max(common.max_seq_len, 1)
    )
    return enough and num_bytes * q.dtype.itemsize <= MAX_GATHER_BYTES


# Cached: a property of the device, asked by each launch.
@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU; how the kernel runs on later ones is not measured."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


# Cached: a property of the device, asked by each launch.
@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on `device`; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
