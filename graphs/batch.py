"""A step's tensors: one block of bytes on the host, one copy to the device, views on both sides.

S requests, T rows, M blocks a request may own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from attn_ops import PAD_SLOT_ID, CommonAttentionMetadata
from attn_ops.metadata import positions_of_step, slots_of_step
from graphs.scheduler import Scheduled


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """Inputs of one step. `host` and `device` hold the same fields; `upload` copies all."""

    num_tokens: int
    num_reqs: int
    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]
    host_bytes: torch.Tensor
    device_bytes: torch.Tensor

    @classmethod
    def allocate(
        cls, num_tokens: int, num_reqs: int, max_blocks: int, device: torch.device
    ) -> "StepTensors":
        """Room for T = `num_tokens` rows and S = `num_reqs` requests, filled as padding.

        Fields: input_ids, position_ids [1, T] int64; slot_mapping [T] int64; logits_indices [S]
        int64; query_start_loc [S+1] int32; seq_lens [S] int32; block_table [S, M] int32;
        temperature [S] float32.
        """
        layout = {
            "input_ids": ((1, num_tokens), torch.int64),
            "position_ids": ((1, num_tokens), torch.int64),
            "slot_mapping": ((num_tokens,), torch.int64),
            "logits_indices": ((num_reqs,), torch.int64),
            "query_start_loc": ((num_reqs + 1,), torch.int32),
            "seq_lens": ((num_reqs,), torch.int32),
            "block_table": ((num_reqs, max_blocks), torch.int32),
            "temperature": ((num_reqs,), torch.float32),
        }
        sizes = [_align(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in layout.values()]
        host_bytes = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        device_bytes = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        step = cls(
            num_tokens,
            num_reqs,
            _views(host_bytes, layout, sizes),
            _views(device_bytes, layout, sizes),
            host_bytes,
            device_bytes,
        )
        step.clear()
        return step

    def clear(self) -> None:
        """Make every row padding on the host: slot -1, requests of one row, no cached tokens."""
        self.host_bytes.zero_()
        self.host["slot_mapping"].fill_(PAD_SLOT_ID)
        rows = torch.arange(self.num_reqs + 1, dtype=torch.int32).clamp_(max=self.num_tokens)
        self.host["query_start_loc"].copy_(rows)
        last_row = max(self.num_tokens - 1, 0)
        self.host["logits_indices"].copy_(torch.arange(self.num_reqs).clamp_(max=last_row))

    def fill(
        self, step: Sequence[Scheduled], tables: Sequence[Sequence[int]], block_size: int
    ) -> None:
        """Write a step's requests into the host side; the rest stays padding.

        Args:
            step: at most S requests with at most T tokens in all.
            tables: blocks of each request.
            block_size: tokens a block holds.
        """
        self.clear()
        query = np.array([s.num_tokens for s in step], dtype=np.int32)
        computed = np.array([s.request.num_computed for s in step], dtype=np.int32)
        start = np.zeros(len(step) + 1, dtype=np.int32)
        np.cumsum(query, out=start[1:])
        num_tokens, num_reqs = int(start[-1]), len(step)
        host = {name: tensor.numpy() for name, tensor in self.host.items()}
        for row, blocks in zip(host["block_table"], tables, strict=False):
            row[: len(blocks)] = blocks
        ids: list[int] = []
        for scheduled in step:
            begin = scheduled.request.num_computed
            ids += scheduled.request.tokens(begin, begin + scheduled.num_tokens)
        host["input_ids"][0, :num_tokens] = ids
        host["position_ids"][0, :num_tokens] = positions_of_step(query, computed, start)
        host["slot_mapping"][:num_tokens] = slots_of_step(
            query, computed, start, host["block_table"][:num_reqs], block_size
        )
        host["query_start_loc"][: num_reqs + 1] = start
        host["logits_indices"][:num_reqs] = start[1:] - 1
        host["seq_lens"][:num_reqs] = computed + query
        host["temperature"][:num_reqs] = [s.request.temperature for s in step]

    def upload(self) -> None:
        """Copy the host side to the device, without waiting for it."""
        self.device_bytes.copy_(self.host_bytes, non_blocking=True)

    def common(
        self, max_query_len: int, max_seq_len: int, num_actual_tokens: int
    ) -> CommonAttentionMetadata:
        """The batch as backends take it; tensors are the device side, mirrors the host side."""
        starts = self.host["query_start_loc"]
        return CommonAttentionMetadata(
            query_start_loc=self.device["query_start_loc"],
            query_start_loc_cpu=starts,
            seq_lens=self.device["seq_lens"],
            seq_lens_cpu=self.host["seq_lens"],
            num_computed_tokens_cpu=(self.host["seq_lens"] - starts.diff()).clamp_(min=0),
            num_reqs=self.num_reqs,
            num_actual_tokens=num_actual_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=self.device["block_table"],
            slot_mapping=self.device["slot_mapping"],
            logits_indices=self.device["logits_indices"],
        )


def _align(num_bytes: int) -> int:
    """Sections start at multiples of 16 bytes, which kernels read fastest."""
    return -(-num_bytes // 16) * 16


def _views(
    block: torch.Tensor, layout: dict[str, tuple[tuple[int, ...], torch.dtype]], sizes: list[int]
) -> dict[str, torch.Tensor]:
    views, begin = {}, 0
    for (name, (shape, dtype)), size in zip(layout.items(), sizes, strict=True):
        used = int(np.prod(shape)) * dtype.itemsize
        views[name] = block[begin : begin + used].view(dtype).view(shape)
        begin += size
    return views
