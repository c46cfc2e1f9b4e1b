"""One batch, described once, for every attention backend.

Shapes: S requests, T tokens (rows) of the batch, M blocks a request may own.
Names and meanings are the field's own (vLLM's v1 attention metadata).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

PAD_SLOT_ID = -1
"""Slot of a padding row. The KV write sends it to the null block (block 0)."""


@dataclasses.dataclass(frozen=True, eq=False)
class CommonAttentionMetadata:
    """What all backends need to know about a step.

    The device never has to be read: everything the host must know stands in the
    `_cpu` mirrors and the ints.
    """

    query_start_loc: torch.Tensor  # [S+1] int32, device: first query row per request, cumulative
    query_start_loc_cpu: torch.Tensor  # [S+1] int32, CPU mirror
    seq_lens: torch.Tensor  # [S] int32, device: tokens in the cache per request after this step
    seq_lens_cpu: torch.Tensor  # [S] int32, CPU mirror
    num_computed_tokens_cpu: torch.Tensor  # [S] int32, CPU: seq_lens minus this step's query tokens
    num_reqs: int  # S, padding requests included
    num_actual_tokens: int  # query rows that belong to a request; rows past it are padding
    max_query_len: int  # longest query of the batch
    max_seq_len: int  # longest seq_len of the batch, or an upper bound under capture
    block_table_tensor: torch.Tensor  # [S, M] int32, device: physical block of each logical block
    slot_mapping: torch.Tensor  # [T] int64, device: block * block_size + offset, or PAD_SLOT_ID
    causal: bool = True
    logits_indices: torch.Tensor | None = None  # [R] int64, device: rows whose logits are wanted

    def __post_init__(self) -> None:
        self._require("query_start_loc", self.query_start_loc, torch.int32, (self.num_reqs + 1,))
        self._require("seq_lens", self.seq_lens, torch.int32, (self.num_reqs,))
        self._require(
            "block_table_tensor", self.block_table_tensor, torch.int32, (self.num_reqs, None)
        )
        self._require("slot_mapping", self.slot_mapping, torch.int64, (None,))
        self._require(
            "query_start_loc_cpu",
            self.query_start_loc_cpu,
            torch.int32,
            (self.num_reqs + 1,),
            "cpu",
        )
        self._require("seq_lens_cpu", self.seq_lens_cpu, torch.int32, (self.num_reqs,), "cpu")
        self._require(
            "num_computed_tokens_cpu",
            self.num_computed_tokens_cpu,
            torch.int32,
            (self.num_reqs,),
            "cpu",
        )
        if self.logits_indices is not None:
            self._require("logits_indices", self.logits_indices, torch.int64, (None,))

    def _require(
        self,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int | None, ...],
        device: str | None = None,
    ) -> None:
        """Raise a ValueError that names `name` unless dtype, shape (None: any) and device fit."""
        wanted_device = device or self.seq_lens.device.type
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if tensor.device.type != wanted_device:
            raise ValueError(f"{name} must be on {wanted_device}, got {tensor.device}")
        if tensor.dim() != len(shape) or any(
            want is not None and got != want for got, want in zip(tensor.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if s is None else str(s) for s in shape)
            raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        num_padded_tokens: int | None = None,
    ) -> "CommonAttentionMetadata":
        """Build a batch from plain lists.

        Args:
            query_lens: new tokens of each request in this step.
            seq_lens: tokens of each request after this step, `seq_lens[i] >= query_lens[i]`.
            block_table: [S, M] int32, on any device.
            block_size: tokens a block holds.
            num_padded_tokens: rows of the batch, at least `sum(query_lens)`;
                rows past it get PAD_SLOT_ID.

        Raises:
            ValueError: lengths, table and rows do not fit each other; the first offender is named.
        """
        query, seq, table_SM = _checked_lengths(query_lens, seq_lens, block_table, block_size)
        num_tokens = int(query.sum())
        rows = num_tokens if num_padded_tokens is None else num_padded_tokens
        if rows < num_tokens:
            raise ValueError(f"num_padded_tokens must be at least {num_tokens}, got {rows}")
        start = np.zeros(query.size + 1, dtype=np.int32)
        np.cumsum(query, out=start[1:])
        slots = torch.full((rows,), PAD_SLOT_ID, dtype=torch.int64)
        slots[:num_tokens] = torch.from_numpy(
            slots_of_step(query, seq - query, start, table_SM.numpy(), block_size)
        )
        start_cpu, seq_cpu = torch.from_numpy(start), torch.from_numpy(seq)
        return cls(
            query_start_loc=start_cpu.to(device, copy=True),
            query_start_loc_cpu=start_cpu,
            seq_lens=seq_cpu.to(device, copy=True),
            seq_lens_cpu=seq_cpu,
            num_computed_tokens_cpu=torch.from_numpy(seq - query),
            num_reqs=query.size,
            num_actual_tokens=num_tokens,
            max_query_len=int(query.max(initial=0)),
            max_seq_len=int(seq.max(initial=0)),
            block_table_tensor=table_SM.to(device),
            slot_mapping=slots.to(device),
        )


def _checked_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor, block_size: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Copies of `from_lengths`' arguments on the CPU: [S], [S] and [S, M], int32."""
    query = np.array(query_lens, dtype=np.int32).reshape(-1)
    seq = np.array(seq_lens, dtype=np.int32).reshape(-1)
    if query.shape != seq.shape:
        raise ValueError(f"seq_lens must have {query.size} entries like query_lens, got {seq.size}")
    if query.size and (query.min() < 0 or (seq < query).any()):
        bad = int(np.argmax((seq < query) | (query < 0)))
        raise ValueError(
            f"seq_lens must be at least query_lens, got seq_lens[{bad}]={seq[bad]} and "
            f"query_lens[{bad}]={query[bad]}"
        )
    table_SM = block_table.to(device="cpu", dtype=torch.int32, copy=True)
    if table_SM.dim() != 2 or table_SM.shape[0] != query.size:
        raise ValueError(
            f"block_table must have shape [{query.size}, any], got {list(table_SM.shape)}"
        )
    capacity = table_SM.shape[1] * block_size
    if seq.size and seq.max() > capacity:
        bad = int(seq.argmax())
        raise ValueError(
            f"seq_lens must fit block_table, got seq_lens[{bad}]={seq[bad]}; "
            f"supported: up to {capacity} tokens"
        )
    return query, seq, table_SM


def positions_of_step(
    query_lens: np.ndarray, computed: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """Position of every query row in its sequence, [T] int64, without a Python loop."""
    num_tokens = int(start[-1])
    return np.arange(num_tokens, dtype=np.int64) + np.repeat(
        (computed - start[:-1]).astype(np.int64), query_lens
    )


def slots_of_step(
    query_lens: np.ndarray,
    computed: np.ndarray,
    start: np.ndarray,
    table_SM: np.ndarray,
    block_size: int,
) -> np.ndarray:
    """Cache slot of every query row: [T] int64, block * block_size + offset."""
    positions_T = positions_of_step(query_lens, computed, start)
    request_T = np.repeat(np.arange(query_lens.size), query_lens)
    blocks_T = table_SM[request_T, positions_T // block_size].astype(np.int64)
    return blocks_T * block_size + positions_T % block_size
