"""The paged KV cache: one tensor per layer, one allocator of blocks, one table per request.

P physical blocks (block 0 is the null block), B block size, K kv heads, H head size,
M blocks a request may own.
"""

import dataclasses
import math
import os
from collections.abc import Hashable, Sequence

import torch

from attn_ops.metadata import AttentionSpec, KVCacheLayoutType, get_kv_cache_layout

NULL_BLOCK = 0
"""Padding rows are written to it; no request owns it."""


class OutOfBlocksError(ValueError):
    """The cache has fewer free blocks than a request needs. Nothing was allocated."""


@dataclasses.dataclass
class BlockTable:
    """Blocks of one request, in logical order."""

    blocks: list[int]
    num_tokens: int = 0  # tokens that fit into its blocks, as reserved


class PagedKVCache:
    """KV cache of a model in blocks of `block_size` tokens, shared by all requests.

    Args:
        specs: one per layer, in the order of the layers.
        num_tokens: tokens that it must hold, rounded up to blocks. The null block is extra.
        memory_bytes: a budget instead of `num_tokens`: as many blocks as fit in it.
        block_size: tokens a block holds.
        device: where the tensors live.
        cache_layout: NHD, tokens before heads in memory, or HND, heads before tokens. None takes
            what `set_kv_cache_layout` set, else NHD. Shapes are the same; strides differ. Latent
            layers have one head, so both are the same.

    Attributes:
        tensors: per layer [P, 2, B, K, H], index 0 keys and 1 values; of layers with latent
            attention [P, B, Lkv + R]; zero at first.

    Raises:
        ValueError: not exactly one of `num_tokens` and `memory_bytes` is given, or it
            is too small for one block, or too large for the device's memory.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_tokens: int | None = None,
        memory_bytes: int | None = None,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        cache_layout: KVCacheLayoutType | None = None,
    ) -> None:
        self.cache_layout = get_kv_cache_layout(cache_layout)
        if (num_tokens is None) == (memory_bytes is None):
            raise ValueError(
                "exactly one of num_tokens and memory_bytes must be given, "
                f"got {num_tokens} and {memory_bytes}"
            )
        if not specs:
            raise ValueError("specs must name at least one layer, got none")
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.block_size = block_size
        self.specs = tuple(specs)
        self.bytes_per_block = sum(
            math.prod(s.cache_shape(1, block_size)) * s.cache_dtype.itemsize for s in specs
        )
        if num_tokens is not None:
            num_blocks = -(-num_tokens // block_size) + 1
        else:
            assert memory_bytes is not None, "one of the two is given, as checked above"
            num_blocks = memory_bytes // self.bytes_per_block
        if num_blocks < 2:
            raise ValueError(
                f"the cache must hold at least one block of {block_size} tokens beside the null "
                f"block, got room for {num_blocks}; a block takes {self.bytes_per_block} bytes"
            )
        self.num_blocks = num_blocks
        self.tensors = self._allocate_all(torch.device(device), num_tokens)
        # A stack: block 1 is taken first.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._tables: dict[Hashable, BlockTable] = {}

    def _allocate_all(self, device: torch.device, num_tokens: int | None) -> list[torch.Tensor]:
        """Tensors of all layers, or a ValueError that says how many bytes they would take."""
        total = _memory_of(device)
        name = "memory_bytes" if num_tokens is None else "num_tokens (cache_tokens of a session)"
        room = "" if total is None else f" of {total:,} bytes"
        asked = "" if num_tokens is None else f"{num_tokens:,} tokens, which take "
        message = (
            f"{name} must fit into the memory of {device}{room}, "
            f"got {asked}{self.num_bytes:,} bytes"
        )
        if total is not None and self.num_bytes > total:
            raise ValueError(message)
        try:
            return [self._allocate(spec, device) for spec in self.specs]
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise ValueError(f"{message}: {error}") from error
            raise

    def _allocate(self, spec: AttentionSpec, device: torch.device | str) -> torch.Tensor:
        shape = spec.cache_shape(self.num_blocks, self.block_size)
        if self.cache_layout == "NHD" or spec.latent is not None:
            return torch.zeros(shape, dtype=spec.cache_dtype, device=device)
        shape = (*shape[:2], shape[3], shape[2], shape[4])
        return torch.zeros(shape, dtype=spec.cache_dtype, device=device).transpose(2, 3)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit into the empty cache."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def blocks_needed(self, request: Hashable, num_tokens: int) -> int:
        """New blocks that `request` needs to hold `num_tokens` in all."""
        table = self._tables.get(request)
        return max(0, -(-num_tokens // self.block_size) - (len(table.blocks) if table else 0))

    def reserve(self, request: Hashable, num_tokens: int) -> list[int]:
        """Reserve blocks so that `request` holds `num_tokens` in all; returns all its blocks.

        Raises:
            ValueError: `num_tokens` is negative.
            OutOfBlocksError: too few blocks are free; the cache is as it was.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        needed = self.blocks_needed(request, num_tokens)
        if needed > len(self._free):
            raise OutOfBlocksError(
                f"request {request!r} needs {needed} more blocks for {num_tokens} tokens, "
                f"{len(self._free)} of {self.num_blocks - 1} are free"
            )
        table = self._tables.setdefault(request, BlockTable([]))
        table.blocks.extend(self._free.pop() for _ in range(needed))
        table.num_tokens = max(table.num_tokens, num_tokens)
        return list(table.blocks)

    def free(self, request: Hashable) -> None:
        """Give all blocks of `request` back.

        Raises:
            ValueError: the request owns none (never reserved, or freed); the cache is as it was.
        """
        self._known(request)
        self._free.extend(reversed(self._tables.pop(request).blocks))

    def _known(self, request: Hashable) -> BlockTable:
        table = self._tables.get(request)
        if table is None:
            raise ValueError(
                f"request must own blocks, got {request!r}, which is unknown or already freed"
            )
        return table

    def blocks(self, request: Hashable) -> list[int]:
        """Blocks of `request` in logical order; empty if it owns none."""
        table = self._tables.get(request)
        return list(table.blocks) if table else []

    def block_table(self, requests: Sequence[Hashable], width: int | None = None) -> torch.Tensor:
        """[S, M] int32 on the CPU: blocks of each request, then the null block.

        Raises:
            ValueError: a request owns no blocks (never reserved, or freed), or `width` is too
                small.
        """
        rows = [self._known(request).blocks for request in requests]
        longest = max([1, *map(len, rows)])
        if width is not None and width < longest:
            raise ValueError(f"width must be at least {longest}, got {width}")
        table_SM = torch.full((len(rows), width or longest), NULL_BLOCK, dtype=torch.int32)
        for row_M, blocks in zip(table_SM, rows, strict=True):
            row_M[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return table_SM


def _memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has, used or free; None where torch does not tell."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
