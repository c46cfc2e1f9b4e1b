"""One batch, described once, for every attention backend.

S requests, T rows of the batch, M blocks a request may own, R rows whose logits are wanted.
Names and meanings are the field's own (vLLM's v1 attention metadata).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attn_ops.metadata.buffers import MetadataBuffers, padded_row
from attn_ops.metadata.positions import compute_positions_and_slots
from attn_ops.metadata.validation import check_form, check_int, check_values, overlap

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


@dataclasses.dataclass(eq=False)
class CommonAttentionMetadata:
    """What all backends need to know about a step.

    The device never has to be read: what the host must know stands in the `_cpu` mirrors and the
    ints. A mirror that is None is not known on the host (a length that only the device knows, as
    after speculative decoding or inside a captured step); then the maxima are upper bounds.

    Fields may be assigned, as engines do that prepare a step in several places; `validate` checks
    the whole.

    Raises:
        ValueError: a tensor's dtype, shape or device does not fit, its entries are not contiguous,
            or a count is no int; the field is named.
    """

    query_start_loc: torch.Tensor  # [S+1] int32, device: first query row per request, cumulative
    query_start_loc_cpu: torch.Tensor | None  # [S+1] int32, CPU mirror
    seq_lens: torch.Tensor  # [S] int32, device: tokens in the cache per request after this step
    seq_lens_cpu: torch.Tensor | None = None  # [S] int32, CPU mirror
    num_computed_tokens_cpu: torch.Tensor | None = None  # [S] int32, CPU: seq_lens - query lengths
    _: dataclasses.KW_ONLY
    num_reqs: int  # S, padding requests included
    num_actual_tokens: int  # query rows that belong to a request; rows past it are padding
    max_query_len: int  # longest query of the batch, or an upper bound
    max_seq_len: int  # longest seq_len of the batch, or an upper bound under capture
    block_table_tensor: torch.Tensor  # [S, M] int32, device: physical block of each logical block
    slot_mapping: torch.Tensor  # [T] int64, device: block * block_size + offset, or PAD_SLOT_ID
    causal: bool = True
    logits_indices_padded: torch.Tensor | None = None  # [>= R] int32 or int64, device; padded
    num_logits_indices: int | None = None  # R: how many of logits_indices_padded count
    encoder_seq_lens: np.ndarray | torch.Tensor | None = None  # [S], CPU: encoder tokens (cross)
    seq_lens_cpu_upper_bound: torch.Tensor | None = None  # [S] int32, CPU: at least seq_lens
    is_prefilling: torch.Tensor | None = None  # [S] bool: the prompt is not all computed yet
    max_logits_per_req: int | None = None  # most rows of one request in logits_indices_padded
    dcp_local_seq_lens: torch.Tensor | None = None  # [S] int32, device: this rank's tokens, DCP
    positions: torch.Tensor | None = None  # [T] int64, device: of each row in its sequence
    logits_indices: torch.Tensor | None = None  # [R] int64, device: rows whose logits are wanted
    logits_indices_cpu: torch.Tensor | None = None  # [R] int32 or int64, CPU mirror
    num_logits: torch.Tensor | None = None  # [1] int32, device: R, where replays change it
    block_size: int | None = None  # tokens a block holds, where known
    # Both as above, for layers with a window, where their caches have blocks of their own.
    window_block_table_tensor: torch.Tensor | None = None
    window_slot_mapping: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_form(self)

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def batch_size(self) -> int:
        """S, padding requests included."""
        return self.seq_lens.shape[0]

    @property
    def query_lens(self) -> torch.Tensor:
        """[S] int32, device: query tokens of each request in this step."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def num_computed_tokens(self) -> torch.Tensor:
        """[S] int32, device: tokens of each request that earlier steps computed; 0 for padding."""
        return (self.seq_lens - self.query_lens).clamp(min=0)

    def replace(self, **changes: Any) -> "CommonAttentionMetadata":
        """A copy with some fields changed; tensors are shared."""
        return dataclasses.replace(self, **changes)

    def of_windows(self) -> "CommonAttentionMetadata":
        """The batch as layers with a window have it: over blocks of their own, if there are any."""
        if self.window_block_table_tensor is None:
            return self
        assert self.window_slot_mapping is not None, "both are given, or none"
        return self.replace(
            block_table_tensor=self.window_block_table_tensor,
            slot_mapping=self.window_slot_mapping,
            window_block_table_tensor=None,
            window_slot_mapping=None,
        )

    def unpadded(self, num_tokens: int, num_reqs: int) -> "CommonAttentionMetadata":
        """The first `num_reqs` requests and `num_tokens` rows; tensors are views.

        Maxima and the fields about logits stay as they are.

        Raises:
            ValueError: the batch has fewer requests or rows.
        """
        rows = self.slot_mapping.shape[0]
        for name, wanted, there in (
            ("num_tokens", num_tokens, rows),
            ("num_reqs", num_reqs, self.num_reqs),
        ):
            if not 0 <= wanted <= there:
                raise ValueError(f"{name} must be from 0 to {there}, got {wanted}")

        def first(field: Any, count: int = num_reqs) -> Any:
            return None if field is None else field[:count]

        return self.replace(
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=first(self.query_start_loc_cpu, num_reqs + 1),
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_cpu=first(self.seq_lens_cpu),
            num_computed_tokens_cpu=first(self.num_computed_tokens_cpu),
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            block_table_tensor=self.block_table_tensor[:num_reqs],
            slot_mapping=self.slot_mapping[:num_tokens],
            encoder_seq_lens=first(self.encoder_seq_lens),
            seq_lens_cpu_upper_bound=first(self.seq_lens_cpu_upper_bound),
            is_prefilling=first(self.is_prefilling),
            dcp_local_seq_lens=first(self.dcp_local_seq_lens),
            positions=first(self.positions, num_tokens),
            window_block_table_tensor=first(self.window_block_table_tensor),
            window_slot_mapping=first(self.window_slot_mapping, num_tokens),
        )

    def validate(
        self,
        num_blocks: int | None = None,
        block_size: int | None = None,
        read_device: bool = True,
    ) -> None:
        """Check the form of the batch, and its values against each other.

        query_start_loc starts at 0 and never falls; num_actual_tokens lies between its last entry
        and the rows of slot_mapping; seq_lens are at least the query lengths, or 0 with padding
        slots; maxima and upper bounds hold; block ids in use, slots and logits indices are in
        range; mirrors equal their tensors. That slots follow from table and positions is not
        checked: virtual batches and reduced batches keep those of the batch they come from.

        Args:
            num_blocks: blocks of the cache; None checks for negative block ids only.
            block_size: tokens a block holds; None takes the batch's own. Without either every entry
                of the block table counts as used.
            read_device: read tensors on a GPU, which waits for it: for tests and debugging. False
                checks what the host knows.

        Raises:
            ValueError: names the first offender, its index and its value.
        """
        check_form(self)
        if block_size is not None and self.block_size not in (None, block_size):
            raise ValueError(f"block_size must be the batch's {self.block_size}, got {block_size}")
        size = self.block_size if block_size is None else block_size
        for name, value in (("num_blocks", num_blocks), ("block_size", size)):
            if value is not None:
                check_int(name, value, 1)
        check_values(self, num_blocks, size, read_device)

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor | np.ndarray | Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        num_padded_tokens: int | None = None,
        num_padded_reqs: int | None = None,
        out: MetadataBuffers | None = None,
    ) -> "CommonAttentionMetadata":
        """Build a batch from the lengths of its requests: one upload, one kernel, a table copied.

        Args:
            query_lens: new tokens of each request in this step; a list or an array.
            seq_lens: tokens of each request after this step, `seq_lens[i] >= query_lens[i]`.
            block_table: [S, M] int32, on any device; copied. Or an array, or a list of blocks for
                each request.
            block_size: tokens a block holds.
            device: where the batch lives.
            num_padded_tokens: rows of the batch, at least `sum(query_lens)`; rows past it are
                padding, with PAD_SLOT_ID and position 0.
            num_padded_reqs: requests of the batch, at least S; those past it are padding, with no
                query, no cached tokens and a table of null blocks.
            out: buffers that the batch's tensors are written to. A `block_table` that is the first
                rows of `out.block_table` is used where it stands; padding rows of it become 0. One
                that is wider is cut.

        Raises:
            ValueError: lengths, table and rows do not fit each other; the first offender is named.
                Nothing is written.
        """
        lengths = Lengths.checked(query_lens, seq_lens, num_padded_reqs, num_padded_tokens)
        table = as_table(block_table)
        lengths.check_table(table, block_size)
        if out is not None:  # further blocks belong to no token yet
            table = table[:, : max(out.max_blocks, -(-lengths.max_seq_len // block_size))]
        num_reqs, num_rows, width = lengths.num_reqs, lengths.num_rows, table.shape[1]
        if out is None:
            out = MetadataBuffers.allocate(num_reqs, num_rows, width, device)
        out.check_room(num_reqs, num_rows, width, torch.device(device))
        stands_in(table, out)
        starts_cpu, seq_cpu = lengths.upload(out)
        batch = cls(
            query_start_loc=out.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=starts_cpu,
            seq_lens=out.seq_lens[:num_reqs],
            seq_lens_cpu=seq_cpu,
            num_computed_tokens_cpu=torch.from_numpy(lengths.computed),
            num_reqs=num_reqs,
            num_actual_tokens=lengths.num_tokens,
            max_query_len=lengths.max_query_len,
            max_seq_len=lengths.max_seq_len,
            block_table_tensor=lengths.copy_table(table, out),
            slot_mapping=out.slot_mapping[:num_rows],
            positions=out.positions[:num_rows],
            block_size=block_size,
        )
        fill_positions_and_slots(out, batch)
        return batch


def fill_positions_and_slots(out: MetadataBuffers, batch: CommonAttentionMetadata) -> None:
    """Compute both from the batch's other tensors, on its device."""
    assert batch.block_size is not None, "set by from_lengths"
    compute_positions_and_slots(
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table_tensor,
        batch.block_size,
        out.positions[: batch.slot_mapping.shape[0]],
        batch.slot_mapping,
    )
