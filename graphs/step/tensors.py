"""A step's tensors: one block of bytes on the host, one copy to the device, views on both sides.

All state of a step stands in that block, what the device changes by itself too. So it is uploaded,
saved and restored by one copy.

S requests, T rows, R rows of logits, V vocabulary, N steps without the host, M blocks a request may
own, K stop tokens.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from attn_ops import PAD_SLOT_ID, CommonAttentionMetadata
from attn_ops.metadata import positions_of_step, slots_of_step
from graphs.requests.scheduled import Scheduled
from graphs.sampling import FIELDS

MAX_STOP_TOKENS = 8
"""Of a request that the device watches. Further ones the host sees, when it reads the tokens."""


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """Inputs of one step and what it leaves. `host` and `device` hold the same fields.

    `query_len` is that of all requests, padding too; None: they differ, and the last request of the
    batch is one of padding that owns the rows after the others.
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None
    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]
    host_bytes: torch.Tensor
    device_bytes: torch.Tensor
    num_uploaded: int  # bytes in front of `tokens`, which stay until the next step draws its own
    arrays: dict[str, np.ndarray]  # of `host`
    uploaded: torch.cuda.Event | None  # after the last upload; None where there is no GPU

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        num_reqs: int,
        max_blocks: int,
        device: torch.device,
        *,
        query_len: int | None = None,
        num_steps: int = 1,
        logits: bool = True,
    ) -> "StepTensors":
        """Room for T = `num_tokens` rows and S = `num_reqs` requests, filled as padding.

        Fields: input_ids, position_ids [1, T] int64; slot_mapping [T] int64; logits_indices [R]
        int64; query_start_loc [S+1] int32; seq_lens [S] int32; block_table [S, M] int32; those of
        `graphs.sampling.FIELDS` [S]; stop_tokens [S, K] int64; remaining [S] int32, tokens that a
        request may still get; active [S] bool, requests that go on; sources [S] int32, rows of the
        step before whose tokens are the requests' inputs, -1 for none; step [1] int64; num_logits
        [1] int32, rows of logits that are a request's; tokens [N, R] int64, what was drawn. R is T
        in a batch of equal queries of several rows, else S; 0 where no `logits` are wanted.
        """
        num_rows = num_tokens if query_len is not None else num_reqs
        num_rows = num_rows if logits else 0
        layout = _layout(num_tokens, num_reqs, num_rows, max_blocks, num_steps)
        sizes = [_align(math.prod(shape) * dtype.itemsize) for shape, dtype in layout.values()]
        on_gpu, uint8 = device.type == "cuda", torch.uint8
        host_bytes = torch.zeros(sum(sizes), dtype=uint8, device="cpu", pin_memory=on_gpu)
        device_bytes = torch.zeros(sum(sizes), dtype=uint8, device=device)
        host = _views(host_bytes, layout, sizes)
        step = cls(
            num_tokens,
            num_reqs,
            query_len,
            host,
            _views(device_bytes, layout, sizes),
            host_bytes,
            device_bytes,
            sum(sizes[:-1]),
            {name: tensor.numpy() for name, tensor in host.items()},
            torch.cuda.Event() if on_gpu else None,
        )
        step.clear()
        return step

    def clear(self) -> None:
        """Make every row padding on the host: slot -1, requests without cached tokens."""
        host = self.arrays
        if self.uploaded is not None:
            self.uploaded.synchronize()  # the copy of a step that was interrupted may be on its way
        self.host_bytes.numpy().fill(0)  # by this thread: torch would wake all of them
        host["slot_mapping"].fill(PAD_SLOT_ID)
        host["stop_tokens"].fill(-1)
        host["sources"].fill(-1)
        for name, (_, neutral) in FIELDS.items():
            if neutral:
                host[name].fill(neutral)
        if self.query_len is not None:
            host["query_start_loc"][:] = np.arange(self.num_reqs + 1) * self.query_len
            host["logits_indices"][:] = np.arange(self.num_tokens)
        else:
            host["query_start_loc"][-1] = self.num_tokens

    def fill(
        self, step: Sequence[Scheduled], tables: Sequence[Sequence[int]], block_size: int
    ) -> None:
        """Write a step's requests into the host side; the rest stays padding.

        Args:
            step: at most S requests with at most T tokens in all; with rows left, at most S - 1.
            tables: blocks of each request.
            block_size: tokens a block holds.
        """
        self.clear()
        query = np.array([s.num_tokens for s in step], dtype=np.int32)
        computed = np.array([s.num_computed for s in step], dtype=np.int32)
        start = np.zeros(len(step) + 1, dtype=np.int32)
        np.cumsum(query, out=start[1:])
        num_tokens, num_reqs = int(start[-1]), len(step)
        host = self.arrays
        for row, blocks in zip(host["block_table"], tables, strict=False):
            row[: len(blocks)] = blocks
        host["input_ids"][0, :num_tokens] = [t for s in step for t in s.tokens()]
        positions = positions_of_step(query, computed, start)
        # Drafts may go on after the last position that the model has. Nobody wants those rows, but
        # a position is an index, and of some models (dynamic RoPE) all rows depend on the largest.
        last = np.array([s.request.max_tokens - 1 for s in step], dtype=np.int64)
        host["position_ids"][0, :num_tokens] = np.minimum(positions, np.repeat(last, query))
        room = np.array([len(blocks) for blocks in tables], dtype=np.int64) * block_size
        slots = slots_of_step(query, computed, start, host["block_table"][:num_reqs], block_size)
        beyond = positions >= np.repeat(room, query)
        host["slot_mapping"][:num_tokens] = np.where(beyond, PAD_SLOT_ID, slots)
        host["query_start_loc"][: num_reqs + 1] = start
        if self.query_len is None:
            host["query_start_loc"][num_reqs + 1 : -1] = num_tokens
        if self.query_len is None and self.num_rows:
            host["logits_indices"][:num_reqs] = start[1:] - 1
            host["num_logits"][0] = num_reqs
        host["seq_lens"][:num_reqs] = computed + query
        for name in FIELDS:
            host[name][:num_reqs] = [getattr(s.request.sampling, name) for s in step]
        host["remaining"][:num_reqs] = [s.remaining for s in step]
        host["sources"][:num_reqs] = [s.source for s in step]
        host["active"][:num_reqs] = True
        for row, scheduled in zip(host["stop_tokens"], step, strict=False):
            stops = sorted(scheduled.request.stops)[:MAX_STOP_TOKENS]
            row[: len(stops)] = stops

    def upload(self) -> None:
        """Copy the host side but for `tokens` to the device, without waiting for it."""
        device, host = self.device_bytes, self.host_bytes
        number = self.num_uploaded
        device[:number].copy_(host[:number], non_blocking=True)
        if self.uploaded is not None:
            self.uploaded.record()

    @property
    def num_rows(self) -> int:
        """R."""
        return self.host["logits_indices"].shape[0]

    @property
    def max_query_len(self) -> int:
        """Rows of the longest request on the host side, padding included."""
        if self.query_len is not None:
            return self.query_len
        return int(np.diff(self.arrays["query_start_loc"]).max(initial=0))

    def sampling(self) -> Mapping[str, torch.Tensor]:
        """The fields of `graphs.sampling.FIELDS`, on the device, one entry a row of logits."""
        repeats = self.query_len or 1
        fields = {name: self.device[name] for name in FIELDS}
        if repeats == 1:
            return fields
        return {name: field.repeat_interleave(repeats) for name, field in fields.items()}

    def common(
        self, max_query_len: int, max_seq_len: int, *, on_host: bool = True
    ) -> CommonAttentionMetadata:
        """The batch as backends take it; tensors are the device side, mirrors the host side.

        `on_host` False leaves the mirrors out: under capture, where their values are not those of
        a replay.
        """
        starts = self.host["query_start_loc"]
        mirrors = {
            "query_start_loc_cpu": starts,
            "seq_lens_cpu": self.host["seq_lens"],
            "num_computed_tokens_cpu": (self.host["seq_lens"] - starts.diff()).clamp_(min=0),
        }
        if not on_host:
            mirrors = dict.fromkeys(mirrors)
        indices = self.device["logits_indices"]
        logits = {"logits_indices_padded": indices, "num_logits_indices": indices.shape[0]}
        if self.query_len is None:
            logits["max_logits_per_req"] = 1
            if on_host:
                count = int(self.arrays["num_logits"][0])
                logits["num_logits_indices"] = count
                logits["logits_indices_cpu"] = self.host["logits_indices"][:count]
            else:
                logits["num_logits"] = self.device["num_logits"]
        return CommonAttentionMetadata(
            query_start_loc=self.device["query_start_loc"],
            seq_lens=self.device["seq_lens"],
            num_reqs=self.num_reqs,
            num_actual_tokens=self.num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=self.device["block_table"],
            slot_mapping=self.device["slot_mapping"],
            logits_indices=self.device["logits_indices"],
            **mirrors,  # pyright: ignore[reportArgumentType]
            **logits,
        )


def _layout(
    num_tokens: int, num_reqs: int, num_rows: int, max_blocks: int, num_steps: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every field; see `StepTensors.allocate`."""
    return {
        "input_ids": ((1, num_tokens), torch.int64),
        "position_ids": ((1, num_tokens), torch.int64),
        "slot_mapping": ((num_tokens,), torch.int64),
        "logits_indices": ((num_rows,), torch.int64),
        "query_start_loc": ((num_reqs + 1,), torch.int32),
        "seq_lens": ((num_reqs,), torch.int32),
        "block_table": ((num_reqs, max_blocks), torch.int32),
        **{name: ((num_reqs,), dtype) for name, (dtype, _) in FIELDS.items()},
        "stop_tokens": ((num_reqs, MAX_STOP_TOKENS), torch.int64),
        "remaining": ((num_reqs,), torch.int32),
        "active": ((num_reqs,), torch.bool),
        "sources": ((num_reqs,), torch.int32),
        "step": ((1,), torch.int64),
        "num_logits": ((1,), torch.int32),
        "tokens": ((num_steps, num_rows), torch.int64),
    }


def _align(num_bytes: int) -> int:
    """Sections start at multiples of 16 bytes, which kernels read fastest."""
    return -(-num_bytes // 16) * 16


def _views(
    block: torch.Tensor, layout: dict[str, tuple[tuple[int, ...], torch.dtype]], sizes: list[int]
) -> dict[str, torch.Tensor]:
    views, begin = {}, 0
    for (name, (shape, dtype)), size in zip(layout.items(), sizes, strict=True):
        used = math.prod(shape) * dtype.itemsize
        views[name] = block[begin : begin + used].view(dtype).view(shape)
        begin += size
    return views
