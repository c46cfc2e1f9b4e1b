"""The blocks of a paged cache: who owns them, and which are kept for the tokens they hold.

States of a block, by what says so:

======  ================================================================
owned   it stands in one table, or in several that share it
kept    nobody owns it and `PrefixIndex` knows its tokens; taken again
        where no block is free, the least recently used one first
free    neither
======  ================================================================
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from attn_ops.prefixes import NO_MATCH, Content, Match, PrefixIndex

NULL_BLOCK = 0
"""Padding rows are written to it; no request owns it."""


class OutOfBlocksError(ValueError):
    """The cache has fewer free blocks than a request needs. Nothing was allocated."""


@dataclasses.dataclass
class BlockTable:
    """Blocks of one request, in logical order; the null block for those given back."""

    blocks: list[int]
    num_tokens: int = 0  # tokens that fit into its blocks, as reserved
    copied: tuple[int, int] | None = None  # block to read and own block to write, not copied yet
    num_released: int = 0  # of its first blocks, that were given back or never taken


class BlockPool:
    """Blocks 1 to P - 1.

    Args:
        num_blocks: P.
        block_size: tokens a block holds.

    Attributes:
        num_evicted: kept blocks that were taken for something else.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[Hashable, BlockTable] = {}
        self.index = PrefixIndex()
        self.num_evicted = 0
        self._owners: Counter[int] = Counter()  # tables that a block stands in
        self.kept: dict[int, None] = {}
        self.free_blocks = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: block 1 is first

    @property
    def num_available(self) -> int:
        """Blocks that nobody owns, kept ones among them."""
        return len(self.free_blocks) + len(self.kept)

    def needed(self, request: Hashable, num_tokens: int, match: Match = NO_MATCH) -> int:
        """Blocks that must be available for `request` to hold `num_tokens` in all.

        Shared blocks that nobody owns count, as they are available no more.
        """
        table = self.tables.get(request)
        have = len(table.blocks) if table else len(match.blocks)
        idle = sum(block in self.kept for block in match.blocks)
        return max(0, -(-num_tokens // self.block_size) - have) + idle

    def reserve(self, request: Hashable, num_tokens: int, match: Match) -> list[int]:
        """All blocks of `request`; arguments and errors as `PagedKVCache.reserve`."""
        needed = self.needed(request, num_tokens, match)
        if needed > self.num_available:
            raise OutOfBlocksError(
                f"request {request!r} needs {needed} more blocks for {num_tokens} tokens, "
                f"{self.num_available} of {self.num_blocks - 1} are free"
            )
        table = self.tables.get(request)
        assert table is None or not match.num_tokens, f"{request!r} owns blocks already"
        old = table or BlockTable([])
        for block in match.blocks:
            self.kept.pop(block, None)
        blocks = [*old.blocks, *match.blocks]
        blocks += [self._taken() for _ in range(-(-num_tokens // self.block_size) - len(blocks))]
        for block in blocks[len(old.blocks) :]:
            if block != NULL_BLOCK:
                self._owners[block] += 1
        copied = old.copied
        if match.source is not None:
            copied = match.source, blocks[len(match.blocks)]
            if match.source in self.kept:
                self.kept[match.source] = self.kept.pop(match.source)  # used most recently
        number = max(old.num_tokens, num_tokens)
        behind = old.num_released
        while behind < len(match.blocks) and match.blocks[behind] == NULL_BLOCK:
            behind += 1
        self.tables[request] = BlockTable(blocks, number, copied, behind)
        return list(blocks)

    def free(self, request: Hashable) -> None:
        """Give the blocks of `request` back; those whose tokens are known are kept."""
        self._disown(self.tables.pop(request).blocks)

    def release(self, request: Hashable, number: int) -> None:
        """Give the first blocks of `request` back; in its table stands the null block instead."""
        table = self.tables[request]
        first, number = table.num_released, min(number, len(table.blocks))
        gone = table.blocks[first:number]
        if table.copied is not None or not gone:
            return  # a block that is yet to be copied is not given away
        blocks = table.blocks.copy()
        blocks[first:number] = [NULL_BLOCK] * len(gone)
        self.tables[request] = BlockTable(blocks, table.num_tokens, num_released=number)
        self._disown(gone)

    def _disown(self, blocks: Sequence[int]) -> None:
        """Of blocks that stood in a table: those that are in no other are kept, or free."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            del self._owners[block]
            if block in self.index.contents:
                self.kept[block] = None
            else:
                self.free_blocks.append(block)

    def forget(self) -> None:
        """Keep no block, and share none that is owned with anybody else."""
        self.index = PrefixIndex()
        self.free_blocks += self.kept
        self.kept = {}

    def keep(self, contents: Mapping[int, Content]) -> None:
        """Say what blocks hold that somebody owns: others may share it, and it stays after them."""
        for block, content in contents.items():
            assert self._owners[block], f"somebody owns block {block}"
            self.index.put(block, content)

    def _taken(self) -> int:
        """A block for somebody: a free one, or the least recently used of the kept."""
        if self.free_blocks:
            return self.free_blocks.pop()
        block = next(iter(self.kept))
        del self.kept[block]
        self.index.drop(block)
        self.num_evicted += 1
        return block
