"""Block-sparse patterns: which blocks of keys a block of queries sees, and how kernels read it."""

from attn_ops.block_layout.layout import (
    BlockLayout,
    dilated,
    layout_of,
    local_strided,
    sliding_global,
)
from attn_ops.block_layout.masks import dense_mask, flex_block_mask
from attn_ops.block_layout.params import BlocksparseParams, block_mask, sees
from attn_ops.block_layout.picture import distinct, svg, text
from attn_ops.block_layout.tables import Blocksparse, BlockTables, tables_of

__all__ = [
    "BlockLayout",
    "BlockTables",
    "Blocksparse",
    "BlocksparseParams",
    "block_mask",
    "dense_mask",
    "dilated",
    "distinct",
    "flex_block_mask",
    "layout_of",
    "local_strided",
    "sees",
    "sliding_global",
    "svg",
    "tables_of",
    "text",
]
