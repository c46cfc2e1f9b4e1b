"""A layout as kernels read it: int32 tensors on the device, buffers that move with a model.

N query heads, K kv heads, G = N // K, R blocks of the longest sequence, E listed blocks,
U units of at most 32 query heads of one kv head, F blocks that units list.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from attn_ops.block_layout.layout import BlockLayout, check_length, local_strided
from attn_ops.block_layout.params import BlocksparseParams

UNIT_HEADS = 32
"""Query heads of a unit: their bits fit int32."""

TABLES = ("starts", "columns", "unit_starts", "unit_entries")
"""Buffers of `BlockTables`, in the order in which the operators take them."""


class BlockTables(nn.Module):
    """What the operators are given of a layout. Layers with one layout may share the module.

    The buffers are made on the default device. They are not saved. Loaders of weights put empty
    tensors in their place (`from_pretrained`, `to_empty`); those get the layout's values.

    Attributes:
        block_size: tokens of a block.
        starts: [N, R + 1] int32; a head's row r lists columns[starts[n, r] : starts[n, r + 1]].
        columns: [E] int32.
        unit_starts: [U, R + 1] int32; the same for the blocks that any head of a unit sees.
        unit_entries: [F, 2] int32: the block, and the unit's heads that see it, one bit each.
    """

    starts: torch.Tensor
    columns: torch.Tensor
    unit_starts: torch.Tensor
    unit_entries: torch.Tensor

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout, self.block_size = layout, layout.block_size
        device = torch.get_default_device()
        device = "cpu" if device.type == "meta" else device  # there is nothing to load them from
        self._made = (layout.starts, layout.columns, *unit_tables(layout))
        for name, tensor in zip(TABLES, self._made, strict=True):
            self.register_buffer(name, tensor.to(device, copy=True), persistent=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TABLES and isinstance(value, torch.Tensor):
            self._fill(name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in self._buffers.items():
            if tensor is not None and tensor is not before[name]:
                self._fill(name, tensor)
        return self

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the layout's values into a table that takes the place of another."""
        made = self._made[TABLES.index(name)]
        if (tensor.shape, tensor.dtype) != (made.shape, made.dtype):
            raise ValueError(
                f"{name} must have shape {list(made.shape)} and {made.dtype}, those of the layout, "
                f"got {list(tensor.shape)} and {tensor.dtype}; another layout takes new BlockTables"
            )
        if not tensor.is_meta:
            tensor.copy_(made)

    def tensors(self) -> list[torch.Tensor]:
        """What `TABLES` names."""
        return [self.starts, self.columns, self.unit_starts, self.unit_entries]

    def check_length(self, num_tokens: int, name: str = "max_seq_len") -> None:
        """Raise a ValueError unless sequences of so many tokens fit; `name`: the argument."""
        check_length(num_tokens, self.layout.max_seqlen, name)

    def extra_repr(self) -> str:
        heads, blocks = self.starts.shape
        return f"{heads} heads, {blocks - 1} blocks of {self.block_size}"


Blocksparse = BlocksparseParams | BlockLayout | BlockTables
"""How a layer says which blocks it sees."""


def tables_of(blocksparse: Blocksparse, num_heads: int, num_kv_heads: int) -> BlockTables:
    """The tables of whatever a layer was given.

    Raises:
        TypeError: it is no layout.
        ValueError: it is that of other numbers of heads.
    """
    if isinstance(blocksparse, BlocksparseParams):
        blocksparse = local_strided(blocksparse)
    if isinstance(blocksparse, BlockLayout):
        blocksparse = BlockTables(blocksparse)
    if not isinstance(blocksparse, BlockTables):
        raise TypeError(
            "blocksparse must be BlocksparseParams, a BlockLayout or BlockTables, "
            f"got {type(blocksparse).__name__}"
        )
    layout = blocksparse.layout
    if (layout.num_heads, layout.num_kv_heads) != (num_heads, num_kv_heads):
        raise ValueError(
            f"blocksparse must be for {num_heads} heads and {num_kv_heads} KV heads, "
            f"got {layout.num_heads} and {layout.num_kv_heads}"
        )
    return blocksparse


def layout_arguments(blocksparse: BlockTables | None) -> dict[str, Any]:
    """An operator's keywords of a layout; none without one."""
    if blocksparse is None:
        return {}
    return {"sparse_block_size": blocksparse.block_size, "block_layout": blocksparse.tensors()}


def num_units(num_heads: int, num_kv_heads: int) -> int:
    """U."""
    return num_kv_heads * -(-num_heads // num_kv_heads // UNIT_HEADS)


def unit_tables(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """unit_starts [U, R + 1] and unit_entries [F, 2], on the CPU; equal units share entries."""
    group = layout.num_heads // layout.num_kv_heads
    starts_of_head = [row.numpy().tobytes() for row in layout.starts]  # equal: the same columns
    made: dict[tuple[bytes, ...], int] = {}
    starts, entries, of_unit, num_entries = [], [], [], 0
    for kv_head in range(layout.num_kv_heads):
        for first in range(kv_head * group, (kv_head + 1) * group, UNIT_HEADS):
            heads = range(first, min(first + UNIT_HEADS, (kv_head + 1) * group))
            key = tuple(starts_of_head[head] for head in heads)
            if key not in made:
                made[key] = len(starts)
                bits_RR = layout.starts.new_zeros(layout.num_blocks, layout.num_blocks)
                for place, head in enumerate(heads):
                    bits_RR |= layout.mask(head).int() << place
                row, column = bits_RR.nonzero().unbind(1)
                ends = (bits_RR != 0).sum(1).cumsum(0)
                starts.append(torch.nn.functional.pad(ends, (1, 0)) + num_entries)
                entries.append(torch.stack([column.int(), bits_RR[row, column]], 1))
                num_entries += len(column)
            of_unit.append(made[key])
    return torch.stack([starts[i] for i in of_unit]).int(), torch.cat(entries).contiguous()
