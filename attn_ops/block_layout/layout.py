"""Which blocks of keys a block of queries sees, head by head: any causal layout, as lists.

N query heads, K kv heads, R blocks of the longest sequence, E listed blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from attn_ops.block_layout.params import BlocksparseParams, sees

Visible = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""visible(head, query_block [R, 1], block [1, R]) -> bool [R, R], or what broadcasts to it."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks that every query block sees, for each head (compressed sparse rows).

    Row r of head n lists `columns[starts[n, r] : starts[n, r + 1]]`, in ascending order. Heads with
    equal rows may share their columns.

    Attributes:
        block_size: tokens of a block.
        num_kv_heads: K, a divisor of N.
        starts: [N, R + 1] int32, on the CPU.
        columns: [E] int32, on the CPU.

    Raises:
        ValueError: a tensor does not fit, or a row lists a block twice, out of order or behind it.
    """

    block_size: int
    num_kv_heads: int
    starts: torch.Tensor
    columns: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size must be an int of at least 1, got {self.block_size}")
        for name, dims in (("starts", 2), ("columns", 1)):
            x = getattr(self, name)
            if x.dtype != torch.int32 or x.dim() != dims or x.device.type != "cpu":
                raise ValueError(
                    f"{name} must be int32 with {dims} dimensions on the CPU, "
                    f"got {x.dtype} with {x.dim()} on {x.device}"
                )
        num_heads, kv_heads = self.num_heads, self.num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads or not num_heads or self.starts.shape[1] < 2:
            raise ValueError(
                f"starts must be [N, R + 1], N a multiple of num_kv_heads {kv_heads}, "
                f"got {list(self.starts.shape)}"
            )
        self._check_rows()

    def _check_rows(self) -> None:
        for starts in torch.unique(self.starts, dim=0):
            lengths = starts.diff()
            first, end = int(starts[0]), int(starts[-1])
            if first < 0 or end > len(self.columns) or (lengths < 0).any():
                raise ValueError(f"starts must ascend within 0..{len(self.columns)}")
            columns = self.columns[first:end]
            row = _numbers(self.num_blocks).repeat_interleave(lengths)
            same = row[1:] == row[:-1]
            wrong = (columns < 0) | (columns > row)
            wrong[1:] |= same & (columns[1:] <= columns[:-1])
            if wrong.any():
                at = int(wrong.nonzero()[0])
                raise ValueError(
                    "columns must ascend within a row, from 0 up to the row itself, "
                    f"got {int(columns[at])} in row {int(row[at])}"
                )

    @property
    def num_heads(self) -> int:
        """N."""
        return self.starts.shape[0]

    @property
    def num_blocks(self) -> int:
        """R."""
        return self.starts.shape[1] - 1

    @property
    def max_seqlen(self) -> int:
        """Most tokens of a sequence."""
        return self.num_blocks * self.block_size

    def row(self, head: int, query_block: int) -> list[int]:
        """The blocks that a query block sees.

        Raises:
            ValueError: there is no such head or block.
        """
        _check_index("head", head, self.num_heads)
        _check_index("query_block", query_block, self.num_blocks)
        begin, end = self.starts[head, query_block : query_block + 2].tolist()
        return self.columns[begin:end].tolist()

    def mask(self, head: int) -> torch.Tensor:
        """[R, R] bool: row sees column.

        Raises:
            ValueError: there is no such head.
        """
        _check_index("head", head, self.num_heads)
        starts = self.starts[head]
        row = _numbers(self.num_blocks).repeat_interleave(starts.diff())
        mask_RR = starts.new_zeros(self.num_blocks, self.num_blocks, dtype=torch.bool)
        mask_RR[row, self.columns[int(starts[0]) : int(starts[-1])].long()] = True
        return mask_RR

    def density(self, num_blocks: int | None = None) -> float:
        """Listed blocks of the first `num_blocks` rows by those of causal attention, all heads."""
        rows = self.num_blocks if num_blocks is None else num_blocks
        if not 1 <= rows <= self.num_blocks:
            raise ValueError(f"num_blocks must be from 1 to {self.num_blocks}, got {rows}")
        listed = int((self.starts[:, rows] - self.starts[:, 0]).sum())
        return listed / (self.num_heads * rows * (rows + 1) / 2)

    @classmethod
    def from_masks(
        cls, masks: Iterable[torch.Tensor], block_size: int, num_kv_heads: int
    ) -> "BlockLayout":
        """Of a mask [R, R] bool a head; what stands above the diagonal is dropped.

        Raises:
            ValueError: there is none, or they have different shapes.
        """
        distinct: list[torch.Tensor] = []
        starts: list[torch.Tensor] = []
        columns: list[torch.Tensor] = []
        of_head: list[int] = []
        for mask in masks:
            mask = torch.as_tensor(mask, device="cpu").bool()
            wanted = distinct[0].shape if distinct else mask.shape[:1] * 2
            if mask.dim() != 2 or mask.shape != wanted:
                raise ValueError(f"masks must be of one shape [R, R], got {list(mask.shape)}")
            mask = mask.tril()
            known = next((i for i, m in enumerate(distinct) if torch.equal(m, mask)), len(distinct))
            of_head.append(known)
            if known == len(distinct):
                first = sum(map(len, columns))
                distinct.append(mask)
                starts.append(torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)) + first)
                columns.append(mask.nonzero()[:, 1])
        if not distinct:
            raise ValueError("masks must hold one a head, got none")
        return cls(
            block_size,
            num_kv_heads,
            torch.stack([starts[i] for i in of_head]).int(),
            torch.cat(columns).int(),
        )

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[Sequence[int]]], block_size: int, num_kv_heads: int
    ) -> "BlockLayout":
        """Of lists: `rows[head][query_block]` holds the blocks that are seen, in ascending order.

        Raises:
            ValueError: heads have different numbers of rows, or a row is out of order.
        """
        lengths = [[len(row) for row in head] for head in rows]
        if not rows or len({len(head) for head in rows}) != 1:
            raise ValueError(f"rows must be as many for each head, got {list(map(len, rows))}")
        lengths_NR = torch.tensor(lengths, device="cpu")
        totals = lengths_NR.flatten().cumsum(0).view(len(rows), -1)
        starts = torch.cat([totals[:, :1] - lengths_NR[:, :1], totals], 1)
        columns = [c for head in rows for row in head for c in row]
        columns_E = torch.tensor(columns, dtype=torch.int32, device="cpu")
        return cls(block_size, num_kv_heads, starts.int(), columns_E)


def check_length(num_tokens: int, longest: int, name: str = "max_seq_len") -> None:
    """Raise a ValueError unless a layout for `longest` tokens takes sequences of `num_tokens`."""
    if num_tokens > longest:
        raise ValueError(
            f"{name} must be at most {longest}, that of the block layout, got {num_tokens}"
        )


def _numbers(count: int) -> torch.Tensor:
    """0, 1, ..., on the CPU: layouts stay there, whatever device is the default."""
    return torch.arange(count, device="cpu")


def layout_of(
    visible: Visible, num_heads: int, num_kv_heads: int, num_blocks: int, block_size: int
) -> BlockLayout:
    """A layout by a function of head, query block and block; causality is added.

    Raises:
        ValueError: a number is below 1, or num_heads no multiple of num_kv_heads.
    """
    _check(1, num_heads=num_heads, num_blocks=num_blocks)
    row_R1, column_1R = _numbers(num_blocks)[:, None], _numbers(num_blocks)[None, :]
    shape = num_blocks, num_blocks
    masks = (
        torch.as_tensor(visible(head, row_R1, column_1R), device="cpu").broadcast_to(shape)
        for head in range(num_heads)
    )
    return BlockLayout.from_masks(masks, block_size, num_kv_heads)


def _check_index(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name} must be from 0 to {count - 1}, got {value}")


def _check(least: int, **numbers: int) -> None:
    """Raise a ValueError unless all numbers are at least `least`."""
    for name, value in numbers.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def local_strided(params: BlocksparseParams) -> BlockLayout:
    """The layout of `params`, for the heads of their rank."""
    return layout_of(
        functools.partial(sees, params),
        params.num_heads, params.num_kv_heads, params.num_blocks, params.block_size,
    )  # fmt: skip


def sliding_global(
    num_heads: int,
    num_kv_heads: int,
    num_blocks: int,
    block_size: int,
    *,
    window_blocks: int,
    global_blocks: int,
) -> BlockLayout:
    """Every head sees the last `window_blocks`, its own counted, and the first `global_blocks`."""
    _check(0, window_blocks=window_blocks, global_blocks=global_blocks)

    def visible(head: int, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return (row - column < window_blocks) | (column < global_blocks)

    return layout_of(visible, num_heads, num_kv_heads, num_blocks, block_size)


def dilated(
    num_heads: int,
    num_kv_heads: int,
    num_blocks: int,
    block_size: int,
    *,
    dilation: int,
    num_seen: int,
) -> BlockLayout:
    """Every head sees its own block and, `dilation` blocks apart, those before: `num_seen` in all.

    LongNet's form (arXiv:2307.02486), with one dilation for all heads.
    """
    _check(1, dilation=dilation, num_seen=num_seen)

    def visible(head: int, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        distance = row - column
        return (distance % dilation == 0) & (distance < dilation * num_seen)

    return layout_of(visible, num_heads, num_kv_heads, num_blocks, block_size)
