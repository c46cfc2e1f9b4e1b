"""The lengths of a batch's requests on the host, checked once and padded."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from attn_ops.metadata.buffers import MetadataBuffers, padded_row
from attn_ops.metadata.checks import check_int, overlap

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of S requests, padding requests behind them, on the host."""

    packed: np.ndarray  # [2, S padded] int32: start and seq, as `MetadataBuffers.lengths`
    start: np.ndarray  # [S+1]: first query row, cumulative; part of packed
    seq: np.ndarray  # [S]: tokens after this step; part of packed
    computed: np.ndarray  # [S] int32: tokens before this step
    num_real_reqs: int  # requests that are no padding
    num_rows: int  # rows of the batch, padding included
    max_query_len: int
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        return self.seq.size

    @property
    def num_tokens(self) -> int:
        return int(self.start[-1])

    @classmethod
    def checked(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        num_padded_reqs: int | None,
        num_padded_tokens: int | None,
    ) -> "Lengths":
        """Copies of the lengths; `from_lengths` documents arguments and errors."""
        query, seq = _as_int32("query_lens", query_lens), _as_int32("seq_lens", seq_lens)
        if query.shape != seq.shape:
            raise ValueError(
                f"seq_lens must have {query.size} entries like query_lens, got {seq.size}"
            )
        impossible = (query < 0) | (seq < query)
        if impossible.any():
            bad = int(np.argmax(impossible))
            raise ValueError(
                f"seq_lens must be at least query_lens, got seq_lens[{bad}]={seq[bad]} and "
                f"query_lens[{bad}]={query[bad]}"
            )
        real, computed = query.size, seq - query
        ends = np.cumsum(query, dtype=np.int64)
        total = int(ends[-1]) if real else 0
        if total > _INT32.max:
            raise ValueError(f"query_lens must sum to at most {_INT32.max}, got {total}")
        padded = real if num_padded_reqs is None else num_padded_reqs
        rows = total if num_padded_tokens is None else num_padded_tokens
        check_int("num_padded_reqs", padded, real)
        check_int("num_padded_tokens", rows, total)
        packed = np.zeros((2, padded_row(padded)), dtype=np.int32)
        start, all_seq = packed[0, : padded + 1], packed[1, :padded]
        start[1 : real + 1], start[real + 1 :] = ends, total
        all_seq[:real] = seq
        if padded > real:
            computed = np.pad(computed, (0, padded - real))
        longest = (int(query.max()), int(seq.max())) if real else (0, 0)
        return cls(packed, start, all_seq, computed, real, rows, *longest)

    def check_table(self, block_table: torch.Tensor, block_size: int) -> None:
        """Raise a ValueError unless the table has a row a request and blocks for every token.

        A table on a GPU is not read: what its entries are, `validate` tells.
        """
        check_int("block_size", block_size, 1)
        if block_table.dim() != 2 or block_table.shape[0] != self.num_real_reqs:
            raise ValueError(
                f"block_table must have shape [{self.num_real_reqs}, any], "
                f"got {list(block_table.shape)}"
            )
        capacity = block_table.shape[1] * block_size
        if self.max_seq_len > capacity:
            bad = int(self.seq.argmax())
            raise ValueError(
                f"seq_lens must fit block_table, got seq_lens[{bad}]={self.seq[bad]}; "
                f"supported: up to {capacity} tokens"
            )
        if block_table.is_cpu:
            _check_blocks(block_table.numpy(), self.seq[: self.num_real_reqs], block_size)

    def upload(self, out: MetadataBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy start and seq to `out.lengths`, without waiting; returns their CPU mirrors.

        The host side is memory of its own for every step and not pinned: the driver reads such a
        copy before the call returns, so nothing can be overwritten while it is under way.
        """
        host = torch.from_numpy(self.packed)
        out.lengths[:, : host.shape[1]].copy_(host, non_blocking=True)
        return host[0, : self.start.size], host[1, : self.seq.size]

    def copy_table(self, block_table: torch.Tensor, out: MetadataBuffers) -> torch.Tensor:
        """[S, M of `out`]: the table in `out`, null blocks in what it does not fill."""
        real, width = self.num_real_reqs, block_table.shape[1]
        if self.num_reqs > real:
            out.block_table[real : self.num_reqs].zero_()
        if stands_in(block_table, out):
            return out.block_table[: self.num_reqs]
        if width < out.max_blocks:
            out.block_table[:real, width:].zero_()
        # A pinned table would be read while the caller already fills it for the next step.
        source = block_table.clone() if block_table.is_pinned() else block_table
        out.block_table[:real, :width].copy_(source, non_blocking=True)
        return out.block_table[: self.num_reqs]


def _check_blocks(table_SM: np.ndarray, seq_S: np.ndarray, block_size: int) -> None:
    """Raise a ValueError for a negative block of a request; it would wrap to the cache's end."""
    if table_SM.min(initial=0) >= 0:
        return
    first_M = np.arange(table_SM.shape[1]) * block_size  # tokens before each block
    negative_SM = (table_SM < 0) & (first_M < seq_S[:, None])
    if negative_SM.any():
        row, column = np.unravel_index(int(negative_SM.argmax()), negative_SM.shape)
        raise ValueError(
            "block_table must hold block ids from 0 for the tokens of a request, "
            f"got block_table[{row}][{column}]={table_SM[row, column]}"
        )


def stands_in(block_table: torch.Tensor, out: MetadataBuffers) -> bool:
    """Whether the table is the first rows of `out.block_table`, so that nothing is to be copied.

    Raises:
        ValueError: it is another part of `out.block_table`, which is about to be written.
    """
    whole = out.block_table
    if block_table.device != whole.device or not overlap(block_table, whole):
        return False
    if (
        block_table.data_ptr() == whole.data_ptr()
        and block_table.stride() == whole.stride()
        and block_table.shape[1] == whole.shape[1]
    ):
        return True
    raise ValueError(
        "block_table must be the first rows of out.block_table or share no memory with it, "
        f"got a view of shape {list(block_table.shape)}"
    )


def as_table(block_table: torch.Tensor | np.ndarray | Sequence[Sequence[int]]) -> torch.Tensor:
    """[S, M] int32: the tensor itself, or one made of an array or of lists of any lengths."""
    if isinstance(block_table, torch.Tensor):
        if block_table.dtype != torch.int32:
            raise ValueError(f"block_table must have dtype torch.int32, got {block_table.dtype}")
        return block_table
    if not isinstance(block_table, np.ndarray):
        width = max(map(len, block_table), default=0)
        block_table = np.array(
            [[*row, *[0] * (width - len(row))] for row in block_table], dtype=object
        ).reshape(len(block_table), width)
    flat = _as_int32("block_table", block_table.reshape(-1).tolist())
    return torch.from_numpy(flat.reshape(block_table.shape).copy())


def _as_int32(name: str, values: Sequence[int]) -> np.ndarray:
    """`values` as [S] int32; a ValueError for what is no int32."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(array.shape)}")
    if array.dtype == np.int32 or not array.size:
        return array.astype(np.int32, copy=False)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype}")
    if not _INT32.min <= array.min() <= array.max() <= _INT32.max:
        raise ValueError(f"{name} must fit int32, got {array.min()} to {array.max()}")
    return array.astype(np.int32)
