"""The lengths of a batch's requests on the host, checked once and padded."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from attn_ops.metadata.buffers import MetadataBuffers, padded_row

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
        """Copies of the lengths; arguments and errors as of `from_lengths`."""
        query, seq = _as_int32("query_lens", query_lens), _as_int32("seq_lens", seq_lens)
        if query.shape != seq.shape:
            raise ValueError(
                f"seq_lens must have {query.size} entries like query_lens, got {seq.size}"
            )
        real, computed = query.size, seq - query
        if real and (query.min() < 0 or computed.min() < 0):
            bad = int(np.argmax((computed < 0) | (query < 0)))
            raise ValueError(
                f"seq_lens must be at least query_lens, got seq_lens[{bad}]={seq[bad]} and "
                f"query_lens[{bad}]={query[bad]}"
            )
        ends = np.cumsum(query, dtype=np.int64)
        total = int(ends[-1]) if real else 0
        if total > _INT32.max:
            raise ValueError(f"query_lens must sum to at most {_INT32.max}, got {total}")
        padded = real if num_padded_reqs is None else num_padded_reqs
        rows = total if num_padded_tokens is None else num_padded_tokens
        if padded < real:
            raise ValueError(f"num_padded_reqs must be at least {real}, got {padded}")
        if rows < total:
            raise ValueError(f"num_padded_tokens must be at least {total}, got {rows}")
        packed = np.zeros((2, padded_row(padded)), dtype=np.int32)
        start, all_seq = packed[0, : padded + 1], packed[1, :padded]
        start[1 : real + 1], start[real + 1 :] = ends, total
        all_seq[:real] = seq
        if padded > real:
            computed = np.pad(computed, (0, padded - real))
        longest = (int(query.max()), int(seq.max())) if real else (0, 0)
        return cls(packed, start, all_seq, computed, real, rows, *longest)

    def check_table(self, block_table: torch.Tensor, block_size: int) -> None:
        """Raise a ValueError unless the table has a row a request and blocks for every token."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if block_table.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"block_table must have dtype torch.int32, got {block_table.dtype}")
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

    def upload(self, out: MetadataBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy start and seq to `out.lengths`, without waiting; returns their CPU mirrors.

        The host side is memory of its own for every step and not pinned: the driver reads such a
        copy before the call returns, so nothing can be overwritten while it is under way.
        """
        host = torch.from_numpy(self.packed)
        out.lengths[:, : host.shape[1]].copy_(host, non_blocking=True)
        return host[0, : self.start.size], host[1, : self.seq.size]

    def copy_table(self, block_table: torch.Tensor, out: MetadataBuffers) -> torch.Tensor:
        """[S, M of `out`]: the table in `out`, null blocks behind it."""
        real, width = self.num_real_reqs, block_table.shape[1]
        if self.num_reqs > real:
            out.block_table[real : self.num_reqs].zero_()
        if width < out.max_blocks:
            out.block_table[:real, width:].zero_()
        if block_table.data_ptr() != out.block_table.data_ptr() or real == 0:
            out.block_table[:real, :width].copy_(block_table, non_blocking=True)
        return out.block_table[: self.num_reqs]


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
