"""Block tables of requests as rows of one array, each written only when its table has changed.

S requests, M blocks a request may own.
"""

import operator
from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np

from attn_ops.block_pool import NULL_BLOCK, BlockPool, BlockTable


class BlockRows:
    """Rows of requests, which come and go.

    Args:
        pool: whose requests they are.
        max_blocks: M.
        num_rows: requests at a time; more of them make it grow.

    Attributes:
        blocks: [rows, M] int32, block 0 behind the last one; where a request has given its first
            blocks back, its first one that is left.
        num_blocks: [rows] int64.
        versions: [rows] int64; equal ones have equal blocks, and 0 has none.
    """

    def __init__(self, pool: BlockPool, max_blocks: int, num_rows: int) -> None:
        self._pool = pool
        self.blocks = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.versions = np.zeros(num_rows, dtype=np.int64)
        self._owners: list[Hashable | None] = [None] * num_rows
        self._tables: list[BlockTable | None] = [None] * num_rows
        self._row_of: dict[Hashable, int] = {}
        self._next = 0  # the search for a free row begins here
        self._num_written = 0

    def find(self, requests: Sequence[Hashable]) -> np.ndarray:
        """[S] rows of the requests, which own blocks and are all different; up to date."""
        found = list(map(self._pool.tables.__getitem__, requests))
        rows = list(map(self._row_of.get, requests))
        if None not in rows:
            written = map(self._tables.__getitem__, cast(list[int], rows))
            if all(map(operator.is_, found, written)):
                return np.array(rows, dtype=np.int64)  # as in most steps
        for i, request in enumerate(requests):
            row = rows[i]
            if row is None:
                row = rows[i] = self._claim(request)
            if self._tables[row] is not found[i]:
                self._write(row, found[i])
        return np.array(rows, dtype=np.int64)

    def num_common(self, requests: Sequence[Hashable], most: np.ndarray) -> np.ndarray:
        """[S - 1]: how many of its first `most` blocks each request shares with the one before it.

        Blocks are found from a prompt's first one on, so a shared one has the same before it.
        """
        rows = self.find(requests)
        low, high = np.zeros_like(most), most  # `low` are shared, and none from `high` on
        while (low < high).any():
            middle = (low + high + 1) // 2
            same = self.blocks[rows[:-1], middle - 1] == self.blocks[rows[1:], middle - 1]
            open_ones = low < high
            low = np.where(open_ones & same, middle, low)
            high = np.where(open_ones & ~same, middle - 1, high)
        return low

    def _write(self, row: int, table: BlockTable) -> None:
        self._num_written += 1
        self.versions[row] = self._num_written
        behind, number = table.num_released, len(table.blocks)
        self.blocks[row, behind:number] = table.blocks[behind:]
        self.blocks[row, number:] = NULL_BLOCK
        # Kernels read, and mask, keys behind the window. In the null block others may write NaN, so
        # that blocks given back are named by the first one that is the request's.
        self.blocks[row, :behind] = table.blocks[behind] if behind < number else NULL_BLOCK
        self.num_blocks[row] = number
        self._tables[row] = table

    def _claim(self, request: Hashable) -> int:
        """A row that nobody has, or whose owner has no blocks any more."""
        tables, number = self._pool.tables, len(self._owners)
        ordered = ((self._next + i) % number for i in range(number))
        free = (row for row in ordered if self._owners[row] not in tables)
        row = next(free, number)
        if row == number:
            self._grow()
        owner = self._owners[row]
        if self._row_of.get(owner) == row:
            del self._row_of[owner]
        self._tables[row] = None
        self._owners[row] = request
        self._row_of[request] = row
        self._next = row + 1
        return row

    def _grow(self) -> None:
        """Twice the rows."""
        number = len(self._owners)
        for name in ("blocks", "num_blocks", "versions"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._tables += [None] * number
        self._owners += [None] * number
