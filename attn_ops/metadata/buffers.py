"""Device tensors of a batch that the caller owns: a captured step reads them at fixed addresses."""

import dataclasses

import torch

from attn_ops.metadata.validation import check_tensor, is_device, overlap


@dataclasses.dataclass(frozen=True)
class MetadataBuffers:
    """Room for batches of up to S requests, T rows and M blocks a request.

    What is built with `out=buffers` are these tensors or leading slices of them. Entries behind a
    smaller batch are not defined: give a captured step a batch padded to its size.

    Raises:
        ValueError: a tensor is not contiguous.
    """

    lengths: torch.Tensor  # [2, S padded] int32: query_start_loc and seq_lens, one upload for both
    query_start_loc: torch.Tensor  # [S+1] int32, part of lengths
    seq_lens: torch.Tensor  # [S] int32, part of lengths
    block_table: torch.Tensor  # [S, M] int32
    slot_mapping: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64

    def __post_init__(self) -> None:
        for name in ("lengths", "query_start_loc", "seq_lens", "block_table"):
            tensor = getattr(self, name)
            check_tensor(name, tensor, (torch.int32,), (None,) * tensor.dim(), self.lengths.device)
        for name in ("slot_mapping", "positions"):
            tensor = getattr(self, name)
            check_tensor(name, tensor, (torch.int64,), (None,), self.lengths.device)

    @classmethod
    def allocate(
        cls, num_reqs: int, num_tokens: int, max_blocks: int, device: torch.device | str = "cpu"
    ) -> "MetadataBuffers":
        """Uninitialised buffers on `device`.

        Raises:
            ValueError: a size is negative.
        """
        for name, size in (
            ("num_reqs", num_reqs),
            ("num_tokens", num_tokens),
            ("max_blocks", max_blocks),
        ):
            if size < 0:
                raise ValueError(f"{name} must not be negative, got {size}")
        lengths = torch.empty(2, padded_row(num_reqs), dtype=torch.int32, device=device)
        return cls(
            lengths=lengths,
            query_start_loc=lengths[0, : num_reqs + 1],
            seq_lens=lengths[1, :num_reqs],
            block_table=torch.empty(num_reqs, max_blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
            positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        )

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.block_table.shape[1]

    def check_room(
        self, num_reqs: int, num_tokens: int, max_blocks: int, device: torch.device
    ) -> None:
        """Raise a ValueError unless a batch of these sizes fits and lives on `device`."""
        for name, need, room in (
            ("requests", num_reqs, self.num_reqs),
            ("rows", num_tokens, self.num_tokens),
            ("blocks a request", max_blocks, self.max_blocks),
        ):
            if need > room:
                raise ValueError(f"out must have room for {need} {name}, got {room}")
        if not is_device(self.lengths.device, device):
            raise ValueError(f"out must be on {device}, got {self.lengths.device}")

    def check_apart(self, *tensors: torch.Tensor) -> None:
        """Raise a ValueError if a tensor that is read shares memory with what is written."""
        for mine in (self.lengths, self.block_table):
            if any(overlap(mine, tensor) for tensor in tensors):
                raise ValueError("out must not be the buffers of the batch that is read, got those")


def padded_row(num_reqs: int) -> int:
    """int32 entries of one row of `lengths`: S + 1, up to the next 64 bytes."""
    return -(-(num_reqs + 1) // 16) * 16
