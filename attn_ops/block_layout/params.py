"""Local plus strided block sparsity (Phi-3-small): its parameters, and which block sees which.

The pattern is that of vLLM's `BlocksparseParams`. Tensor-parallel size and rank are arguments.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class BlocksparseParams:
    """Local plus strided attention, for the heads of one tensor-parallel rank.

    A query block sees `local_blocks` blocks up to its own, and of all blocks up to its own those
    with `(block + head * head_sliding_step + 1) % vert_stride == 0`. Heads are counted over all
    ranks. A negative step slides along KV heads: then all query heads of a group see the same.

    Attributes:
        max_seqlen: most tokens of a sequence; tables are made for so many.
        num_heads, num_kv_heads: of this rank.
        block_size: tokens a block of the pattern holds; not that of the KV cache.
        local_blocks: blocks that a query block sees up to its own, which counts; 0: none.
        vert_stride: one block of so many is seen by all later ones; 1: every block.
        homo_head: all heads see the same blocks.
        homo_head_group: the query heads of a KV head see the same blocks.
        tp_size, tp_rank: ranks that share the heads, and which one this is.
        head_sliding_step: by how many blocks the stride moves from head to head.
        active_head_range: first head of the rank, and behind its last, counted over all ranks.

    Raises:
        ValueError: a number is out of range, or the numbers of heads do not fit.
    """

    max_seqlen: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    local_blocks: int
    vert_stride: int
    homo_head: bool = False
    homo_head_group: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    head_sliding_step: int = dataclasses.field(init=False)
    active_head_range: tuple[int, int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for name, least in (
            ("max_seqlen", 1), ("num_heads", 1), ("num_kv_heads", 1), ("block_size", 1),
            ("local_blocks", 0), ("vert_stride", 1), ("tp_size", 1), ("tp_rank", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank must be below tp_size {self.tp_size}, got {self.tp_rank}")
        object.__setattr__(self, "head_sliding_step", self._step())
        first = self.tp_rank * self.num_heads
        object.__setattr__(self, "active_head_range", (first, first + self.num_heads))

    def _step(self) -> int:
        if self.homo_head:
            return 0
        if self.homo_head_group:
            return -max(1, self.vert_stride // (self.tp_size * self.num_kv_heads))
        return max(1, self.vert_stride // (self.tp_size * self.num_heads))

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_seqlen // self.block_size)

    def offset(self, head: int) -> int:
        """Blocks by which the stride of query head `head` of this rank is moved."""
        if self.head_sliding_step < 0:
            group = self.num_heads // self.num_kv_heads
            kv_head = self.tp_rank * self.num_kv_heads + head // group
            return kv_head * -self.head_sliding_step
        return (self.active_head_range[0] + head) * self.head_sliding_step


def sees(params: BlocksparseParams, head: int, query_block: Any, block: Any) -> Any:
    """Whether a query block sees a block: the definition of the pattern.

    `query_block` and `block` are ints, or int tensors of shapes that broadcast.
    """
    local = query_block - block < params.local_blocks
    strided = (block + params.offset(head) + 1) % params.vert_stride == 0
    return (block <= query_block) & (local | strided)


def block_mask(
    params: BlocksparseParams, num_q_blocks: int, num_kv_blocks: int, head: int
) -> list[list[bool]]:
    """Which of `num_kv_blocks` each of the last `num_q_blocks` of them sees, by query head.

    Raises:
        ValueError: there are more query blocks than blocks, or the rank has no such head.
    """
    if not 0 <= num_q_blocks <= num_kv_blocks:
        raise ValueError(f"num_q_blocks must be from 0 to {num_kv_blocks}, got {num_q_blocks}")
    if not 0 <= head < params.num_heads:
        raise ValueError(f"head must be from 0 to {params.num_heads - 1}, got {head}")
    return [
        [bool(sees(params, head, row, column)) for column in range(num_kv_blocks)]
        for row in range(num_kv_blocks - num_q_blocks, num_kv_blocks)
    ]
