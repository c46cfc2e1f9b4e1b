"""The paged KV cache: one tensor per layer, one allocator of blocks, one table per request.

P physical blocks (block 0 is the null block), B block size, K kv heads, H head size,
M blocks a request may own.
"""

import functools
import math
import os
from collections.abc import Hashable, Sequence

import torch

from attn_ops.block_pool import NULL_BLOCK, BlockPool, BlockTable, OutOfBlocksError
from attn_ops.mapped_memory import MappedMemory
from attn_ops.metadata import AttentionSpec, KVCacheLayoutType, get_kv_cache_layout
from attn_ops.ops.cache_blocks import copy_blocks
from attn_ops.prefixes import NO_MATCH, ROOT, Content, Key, Match
from attn_ops.states import StatePool

__all__ = ["NULL_BLOCK", "OutOfBlocksError", "PagedKVCache"]


class PagedKVCache:
    """KV cache of a model in blocks of `block_size` tokens, shared by all requests.

    Args:
        specs: one per layer, in the order of the layers.
        num_tokens: tokens that it must hold, rounded up to blocks. The null block is extra.
        memory_bytes: a budget instead of `num_tokens`: as many blocks as fit in it.
        block_size: tokens a block holds.
        device: where the tensors live.
        window_blocks: blocks of layers with a window, the null block among them, where they are to
            have their own: few, as blocks behind the window are given back. `num_tokens` is then
            that of the other layers, and `memory_bytes` includes them.
        cache_layout: NHD, tokens before heads in memory, or HND, heads before tokens. None takes
            what `set_kv_cache_layout` set, else NHD. Shapes are the same; strides differ. Latent
            layers have one head, so both are the same.
        can_sleep: whether `sleep` can give the memory back. On a GPU it needs cuda-bindings.
        states: of layers that keep some; every request that owns blocks has a slot there. They
            stay while the cache sleeps.

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
        window_blocks: int | None = None,
        can_sleep: bool = False,
        states: StatePool | None = None,
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
        self.window_blocks = window_blocks
        windowed = [] if window_blocks is None else [s for s in specs if has_window(s)]
        if window_blocks is not None and (window_blocks < 2 or not 0 < len(windowed) < len(specs)):
            raise ValueError(
                "window_blocks must be at least 2, with layers of both kinds, "
                f"got {window_blocks} for {len(windowed)} of {len(specs)} layers with a window"
            )
        self.window_bytes = (window_blocks or 0) * bytes_per_block(windowed, block_size)
        self.bytes_per_block = bytes_per_block(specs, block_size)
        self.bytes_per_block -= bytes_per_block(windowed, block_size)
        if num_tokens is not None:
            num_blocks = -(-num_tokens // block_size) + 1
        else:
            assert memory_bytes is not None, "one of the two is given, as checked above"
            num_blocks = max(0, memory_bytes - self.window_bytes) // self.bytes_per_block
        if num_blocks < 2:
            raise ValueError(
                f"the cache must hold at least one block of {block_size} tokens beside the null "
                f"block, got room for {num_blocks}; a block takes {self.bytes_per_block} bytes"
            )
        self.num_blocks = num_blocks
        self._memory: MappedMemory | None = None
        self._can_sleep = can_sleep
        self.tensors = self._allocate_all(torch.device(device), num_tokens)
        self.pool = BlockPool(num_blocks, block_size)
        self.window_pool = BlockPool(window_blocks, block_size) if window_blocks else None
        self.states = states

    def _allocate_all(self, device: torch.device, num_tokens: int | None) -> list[torch.Tensor]:
        """Tensors of all layers, or a ValueError that says how many bytes they would take."""
        total, free = _memory_of(device), _free_of(device)
        name = "memory_bytes" if num_tokens is None else "num_tokens (cache_tokens of a session)"
        room = "" if total is None else f" of {total:,} bytes"
        room += "" if free is None else f", of which {free:,} are free"
        asked = "" if num_tokens is None else f"{num_tokens:,} tokens, which take "
        message = (
            f"{name} must fit into the memory of {device}{room}, "
            f"got {asked}{self.num_bytes:,} bytes"
        )
        if any(most is not None and self.num_bytes > most for most in (total, free)):
            raise ValueError(message)
        try:
            if self._can_sleep:
                padding = MappedMemory.ALIGNMENT * len(self.specs)
                self._memory = MappedMemory(self.num_bytes + padding, device)
            tensors = [self._allocate(spec, device) for spec in self.specs]
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise ValueError(f"{message}: {error}") from error
            raise
        for tensor in tensors:  # Inductor's CUDA graphs would copy what they do not know to stay
            torch._dynamo.mark_static_address(tensor)
        return tensors

    def _allocate(self, spec: AttentionSpec, device: torch.device | str) -> torch.Tensor:
        own = self.window_blocks is not None and has_window(spec)
        number = self.window_blocks if own else self.num_blocks
        assert number is not None, "own blocks are counted"
        shape = spec.cache_shape(number, self.block_size)
        if by_head := self.cache_layout == "HND" and spec.latent is None:
            shape = (*shape[:2], shape[3], shape[2], shape[4])
        if self._memory is None:
            tensor = torch.zeros(shape, dtype=spec.cache_dtype, device=device)
        else:
            tensor = self._memory.zeros(shape, spec.cache_dtype)
        return tensor.transpose(2, 3) if by_head else tensor

    def sleep(self) -> None:
        """Give the memory back; the tensors must not be touched until `wake`.

        Raises:
            ValueError: it was not made with `can_sleep`.
        """
        if self._memory is None:
            raise ValueError("can_sleep must be True for a cache that sleeps, got False")
        self._memory.unmap()

    @property
    def is_asleep(self) -> bool:
        return self._memory is not None and not self._memory.is_mapped

    def wake(self) -> None:
        """Take memory again; the tensors are zero, at their old addresses.

        Raises:
            torch.OutOfMemoryError: the GPU has too little left; it sleeps on.
        """
        if self._memory is not None:
            self._memory.map()

    @property
    def own_blocks(self) -> list[bool]:
        """Of every layer, whether it is one with a window whose blocks are its kind's own."""
        return [self.window_pool is not None and has_window(spec) for spec in self.specs]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request owns; of some the tokens may be known."""
        return self.pool.num_available

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit into the empty cache."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block + self.window_bytes

    def blocks_needed(self, request: Hashable, num_tokens: int, match: Match = NO_MATCH) -> int:
        """Free blocks that `request` needs to hold `num_tokens` in all."""
        return self.pool.needed(request, num_tokens, match)

    def has_room(
        self,
        request: Hashable,
        num_tokens: int,
        match: Match = NO_MATCH,
        window_tokens: int | None = None,
        spare: int = 0,
    ) -> bool:
        """Whether `reserve` finds enough free blocks, and `spare` are left of each kind."""
        pool, window = self.pool, self.window_pool
        if self.states is not None and request not in pool.tables and not self.states.num_free:
            return False
        if pool.needed(request, num_tokens, match) + spare > pool.num_available:
            return False
        if window is None:
            return True
        wanted = num_tokens if window_tokens is None else window_tokens
        return window.needed(request, wanted, match.of_windows) + spare <= window.num_available

    def reserve(
        self,
        request: Hashable,
        num_tokens: int,
        match: Match = NO_MATCH,
        window_tokens: int | None = None,
    ) -> list[int]:
        """Reserve blocks so that `request` holds `num_tokens` in all; returns all its blocks.

        Args:
            request: who owns them.
            num_tokens: what they must hold.
            window_tokens: what those of layers with a window must hold, where they have their own;
                None: the same.
            match: of a request that owns none: what `match` found, with no change of the cache
                since. The request shares those blocks; `copy_partial` copies the rest.

        Raises:
            ValueError: `num_tokens` is negative.
            OutOfBlocksError: too few blocks are free; the cache is as it was.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        blocks = self._reserve(request, num_tokens, match, window_tokens)
        if self.states is not None and not self.states.slot(request):
            self.states.take(request)
        return blocks

    def _reserve(
        self, request: Hashable, num_tokens: int, match: Match, window_tokens: int | None
    ) -> list[int]:
        if self.window_pool is None:
            return self.pool.reserve(request, num_tokens, match)
        wanted = num_tokens if window_tokens is None else window_tokens
        window = self.window_pool
        needed = window.needed(request, wanted, match.of_windows)
        if needed > window.num_available:
            raise OutOfBlocksError(
                f"request {request!r} needs {needed} more blocks for layers with a window, "
                f"{window.num_available} of {window.num_blocks - 1} are free"
            )
        blocks = self.pool.reserve(request, num_tokens, match)
        window.reserve(request, wanted, match.of_windows)
        return blocks

    def rooms(self, request: Hashable) -> tuple[int, int]:
        """Tokens that fit into the blocks of `request`: of all layers, and of those with a window.

        Raises:
            ValueError: the request owns none.
        """
        own = self.window_pool or self.pool
        number, window = len(self._known(request).blocks), len(own.tables[request].blocks)
        return number * self.block_size, window * self.block_size

    def free(self, request: Hashable) -> None:
        """Give all blocks of `request` back, but for those that others share, and its slot.

        Raises:
            ValueError: the request owns none (never reserved, or freed); the cache is as it was.
        """
        self._known(request)
        if self.window_pool is not None and request in self.window_pool.tables:
            self.window_pool.free(request)
        self.pool.free(request)
        if self.states is not None:
            self.states.give(request)

    def release(self, request: Hashable, num_blocks: int) -> None:
        """Give the first blocks of `request` back, of which no layer sees a token any more: those
        of the layers with a window, where they have blocks of their own. A step that reads the
        blocks was launched before.

        Raises:
            ValueError: the request owns none.
        """
        self._known(request)
        (self.window_pool or self.pool).release(request, num_blocks)

    # Cached: asked for every request of a step.
    @functools.cached_property
    def window(self) -> int | None:
        """Tokens that the layers see whose blocks `release` gives back, the newest one among them;
        None: one of them sees all, and has no blocks of its own.
        """
        windows = [window_of(s) for s in self.specs]
        if self.window_pool is None and None in windows:
            return None
        return max(w for w in windows if w)

    def _known(self, request: Hashable) -> BlockTable:
        table = self.pool.tables.get(request)
        if table is None:
            raise ValueError(
                f"request must own blocks, got {request!r}, which is unknown or already freed"
            )
        return table

    # -- prefixes ----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], keys: Sequence[Key]) -> Match:
        """What is held of `tokens`, which a request begins with; `keys`: their `block_keys`.

        Where layers with a window have blocks of their own: full blocks, of which those hold the
        ones that the next token sees.
        """
        found = self.pool.index.find(tokens, keys, self.block_size)
        if self.window_pool is None:
            return found
        held = [self.window_pool.index.block_of(key) for key in keys[: len(found.blocks)]]
        number = len(held)
        while number and None in held[self.first_seen(number * self.block_size) : number]:
            number -= 1
        first = self.first_seen(number * self.block_size)
        own = [NULL_BLOCK] * first + [block for block in held[first:number] if block is not None]
        return Match(found.blocks[:number], number * self.block_size, None, tuple(own))

    def first_seen(self, num_computed: int) -> int:
        """The first block that layers with a window see of so many computed tokens, or later.

        One that is not full is kept: every slot of the first block is written.
        """
        assert self.window is not None, "some layers have a window"
        window = max(self.window, self.block_size + 1)
        return max(0, (num_computed - window + 1) // self.block_size)

    def keep(self, request: Hashable, tokens: Sequence[int], keys: Sequence[Key]) -> None:
        """The blocks of `request` hold `tokens`, its first ones; from here on others find them.

        They must be written by what was launched before, and are not to be written again.
        `keys`: their `block_keys`. Of a request whose partial block is not copied yet, nothing is
        kept.
        """
        if self._known(request).copied is not None:
            return
        for pool in (self.window_pool, self.pool):
            if pool is not None:
                self._keep(pool, pool.tables[request].blocks, tokens, keys)

    def _keep(
        self, pool: BlockPool, blocks: Sequence[int], tokens: Sequence[int], keys: Sequence[Key]
    ) -> None:
        parents, known, size = [ROOT, *keys], pool.index.contents, self.block_size
        contents = {}
        for i, (block, key) in enumerate(zip(blocks, keys, strict=False)):
            if block == NULL_BLOCK:
                continue  # given back: nobody sees its tokens any more
            if block not in known or known[block].key != key:
                contents[block] = Content(key, parents[i], tuple(tokens[i * size : (i + 1) * size]))
        pool.keep(contents)

    def copy_partial(self) -> None:
        """Launch the copies of partial blocks that `reserve` has promised, without a host wait.

        Call it before anything else is written to the cache.
        """
        tables = [t for t in self.pool.tables.values() if t.copied is not None]
        if not tables:
            return
        pairs, device = (
            torch.tensor([t.copied for t in tables], device="cpu"),
            self.tensors[0].device,
        )
        if device.type == "cuda":
            pairs = pairs.pin_memory()
        copy_blocks(self.tensors, pairs.to(device, non_blocking=True))
        for table in tables:
            table.copied = None

    def forget_prefixes(self) -> None:
        """Find no tokens any more that were kept; requests go on as they are."""
        if self.window_pool is not None:
            self.window_pool.forget()
        self.pool.forget()

    @property
    def num_kept_blocks(self) -> int:
        """Blocks whose tokens a new request may find."""
        return len(self.pool.index.contents)

    # -- tables ------------------------------------------------------------------------------------

    def blocks(self, request: Hashable) -> list[int]:
        """Blocks of `request` in logical order; empty if it owns none."""
        table = self.pool.tables.get(request)
        return list(table.blocks) if table else []

    def block_table(
        self, requests: Sequence[Hashable], width: int | None = None, *, windows: bool = False
    ) -> torch.Tensor:
        """[S, M] int32 on the CPU: blocks of each request, then the null block.

        A request's first block left stands for those it gave back: padding may write NaN to 0.

        `windows`: those of layers with a window, where they have their own.

        Raises:
            ValueError: a request owns no blocks (never reserved, or freed), `width` is too
                small, or layers with a window have no blocks of their own.
        """
        pool = self.window_pool if windows else self.pool
        if pool is None:
            raise ValueError("windows must be False without window_blocks, got True")
        rows = [pool.tables[request].blocks for request in requests if self._known(request)]
        longest = max([1, *map(len, rows)])
        if width is not None and width < longest:
            raise ValueError(f"width must be at least {longest}, got {width}")
        table_SM = torch.full(
            (len(rows), width or longest), NULL_BLOCK, dtype=torch.int32, device="cpu"
        )
        for row_M, blocks in zip(table_SM, rows, strict=True):
            row_M[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device="cpu")
            row_M[: blocks.count(NULL_BLOCK)] = next(filter(None, blocks), NULL_BLOCK)
        return table_SM


def window_of(spec: AttentionSpec) -> int | None:
    """Tokens that a layer sees, the newest one among them; None: all."""
    if spec.latent or spec.blocksparse or not spec.causal:
        return None
    return spec.sliding_window or spec.attention_chunk_size


def has_window(spec: AttentionSpec) -> bool:
    """Whether a layer's first blocks can be given back while a request goes on."""
    return window_of(spec) is not None


def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int) -> int:
    """Bytes that a block takes in the caches of all layers."""
    return sum(math.prod(s.cache_shape(1, block_size)) * s.cache_dtype.itemsize for s in specs)


def _memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has, used or free; None where torch does not tell."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_of(device: torch.device) -> int | None:
    """Bytes of a GPU that new tensors may take; None of other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
