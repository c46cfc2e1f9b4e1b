"""A step's tensors: one block of bytes on the host, one copy to the device, views on both sides.

All state of a step stands in that block, what the device changes by itself too. So it is uploaded,
saved and restored by one copy. Edits that come late follow by a copy of their own.

S requests, T rows, R rows of logits, V vocabulary, N steps without the host, M blocks a request may
own, K stop tokens.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from attn_ops import PAD_SLOT_ID, CommonAttentionMetadata
from attn_ops.integrations.transformers.rotary import SHIFT
from attn_ops.metadata import positions_of_step
from attn_ops.states import NULL_SLOT
from graphs.requests.batch import Rows
from graphs.requests.requests import MAX_STOP_TOKENS
from graphs.requests.state_slots import fill_kept
from graphs.sampling import FIELDS
from graphs.sampling.edits import num_words
from graphs.step.blocks import BlockRows
from graphs.step.shared import SharedPrefixes

TABLES = {"block_table": "slot_mapping", "window_block_table": "window_slot_mapping"}
"""Block tables, and the slots that follow from each."""

FoundRows = tuple[BlockRows, np.ndarray]
"""Blocks of requests, and which rows of them are those of a step's."""


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
    num_early: int  # those of them in front of the edits
    arrays: dict[str, np.ndarray]  # of `host`
    uploaded: torch.cuda.Event | None  # after the last upload; None where there is no GPU
    edits_uploaded: torch.cuda.Event | None  # the same of the edits
    # [S] int64, of the rows of `BlockRows` that a block table holds; by the table's name.
    versions: dict[str, np.ndarray]

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
        logprobs: int = -1,
        edits: int = -1,
        vocab_size: int = 0,
        num_rows: int | None = None,
        windows: bool = False,
        states: bool = False,
        kept: bool = False,
    ) -> "StepTensors":
        """Room for T = `num_tokens` rows and S = `num_reqs` requests, filled as padding.

        Fields: input_ids, position_ids [1, T] int64; slot_mapping [T] int64; logits_indices [R]
        int64; query_start_loc [S+1] int32; seq_lens [S] int32; block_table [S, M] int32; those of
        `graphs.sampling.FIELDS` [S]; stop_tokens [S, K] int64; remaining [S] int32, tokens that a
        request may still get; active [S] bool, requests that go on; sources [S] int32, rows of the
        step before whose tokens are the requests' inputs, -1 for none; step [1] int64; num_logits
        [1] int32, rows of logits that are a request's; shared_lens [S] int32, tokens of a prefix
        that is attended to apart, 0 for none; group_starts [2S + 1] int32, the first of the
        requests that share each, S behind the last; tokens [N, R] int64, what was drawn. R is T in
        a batch of equal queries of several rows, else S; 0 where no `logits` are wanted. A step
        that scores prompts has `num_rows` of logits, and draws S tokens.

        With `logprobs` = k of at least 0, logprobs [N, R, 1 + k] int64, rows of `packed`. With
        `edits` = B of at least 0, what `graphs.sampling.edits.edited` takes, biases by request.
        With `windows`, window_block_table and window_slot_mapping, of layers with a window. With
        `states`, state_slots and prompt_lens [S] int32, and with `kept` kept_slots [T] int32, see
        `StateCache`.
        """
        num_drawn = num_tokens if query_len is not None else num_reqs
        num_drawn = num_drawn if logits else 0
        num_rows = num_drawn if num_rows is None else num_rows
        layout = _layout(num_tokens, num_reqs, num_rows, max_blocks)
        early = list(layout)
        if edits >= 0:
            layout["allowed"] = ((num_drawn, num_words(vocab_size)), torch.int32)
            layout["bias_ids"] = ((num_reqs, edits), torch.int64)
            layout["bias_values"] = ((num_reqs, edits), torch.float32)
            layout["min_lengths"] = ((num_reqs,), torch.int64)
        layout["tokens"] = ((num_steps, num_drawn), torch.int64)
        if logprobs >= 0:
            layout["logprobs"] = ((num_steps, num_drawn, 1 + logprobs), torch.int64)
        num_left = sum(name in ("tokens", "logprobs") for name in layout)
        if not windows:
            layout = {name: x for name, x in layout.items() if not name.startswith("window_")}
        no_states = () if states else ("state_slots", "prompt_lens", "kept_slots")
        without = no_states if kept else (*no_states, "kept_slots")
        layout = {name: x for name, x in layout.items() if name not in without}
        sizes = [_align(math.prod(shape) * dtype.itemsize) for shape, dtype in layout.values()]
        num_early = sum(name in early for name in layout)
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
            sum(sizes[:-num_left]),
            sum(sizes[:num_early]),
            {name: tensor.numpy() for name, tensor in host.items()},
            torch.cuda.Event() if on_gpu else None,
            torch.cuda.Event() if on_gpu else None,
            {name: np.zeros(num_reqs, dtype=np.int64) for name in TABLES if name in layout},
        )
        step._make_padding()
        return step

    def _make_padding(self) -> None:
        """Make every row padding on the host, whose bytes are 0."""
        host = self.arrays
        self._pad(0, 0)
        self._pad_edits(0)
        self._fill_groups(None, 0)
        if self.query_len is not None:
            host["query_start_loc"][:] = np.arange(self.num_reqs + 1) * self.query_len
            host["logits_indices"][:] = np.arange(self.num_tokens)
        else:
            host["query_start_loc"][-1] = self.num_tokens

    def _pad(self, num_reqs: int, num_tokens: int) -> None:
        """Make requests and rows behind these padding: slot -1, no cached tokens."""
        host = self.arrays
        host["input_ids"][0, num_tokens:] = 0
        host["position_ids"][0, num_tokens:] = 0
        for name in ("seq_lens", "remaining", "active"):
            host[name][num_reqs:] = 0
        for name in ("stop_tokens", "sources"):
            host[name][num_reqs:] = -1
        for name, (_, neutral) in FIELDS.items():
            host[name][num_reqs:] = neutral
        if "state_slots" in host:
            host["state_slots"][num_reqs:] = NULL_SLOT
        for table, versions in self.versions.items():
            host[TABLES[table]][num_tokens:] = PAD_SLOT_ID
            if versions[num_reqs:].any():
                host[table][num_reqs:] = 0
                versions[num_reqs:] = 0
        if self.query_len is None:
            host["query_start_loc"][num_reqs + 1 : -1] = num_tokens
            host["logits_indices"][num_reqs:] = 0

    def fill(self, step: Rows, tables: Sequence[FoundRows], block_size: int) -> None:
        """Write a step's requests into the host side, but for edits; the rest is padding.

        Rows of the block table that it holds already stay.

        Args:
            step: at most S requests with at most T tokens in all; with rows left, at most S - 1.
            tables: blocks of all requests and the rows of these; with `windows`, also those of
                layers with a window.
            block_size: tokens a block holds.
        """
        if self.uploaded is not None:
            self.uploaded.synchronize()  # what was uploaded last may be on its way
        columns = step.columns
        query, computed, packed = columns.num_tokens, columns.num_computed, columns.packed
        start = np.zeros(len(step) + 1, dtype=np.int64)
        np.cumsum(query, out=start[1:])
        num_tokens, num_reqs = int(start[-1]), len(step)
        host = self.arrays
        self._pad(num_reqs, num_tokens)
        for name, (blocks, rows) in zip(self.versions, tables, strict=True):
            self._fill_blocks(name, blocks, rows)
        self._fill_tokens(step, start)
        for name in (*FIELDS, "stop_tokens"):
            host[name][:num_reqs] = packed[name]
        rooms = [blocks.num_blocks[rows] * block_size for blocks, rows in tables]
        self._fill_places(query, computed, start, rooms, packed["last_position"], block_size)
        host["query_start_loc"][: num_reqs + 1] = start
        if self.query_len is None and self.num_rows:
            rows = step.logits_rows(start)
            host["logits_indices"][: rows.size] = rows
            host["num_logits"][0] = rows.size
        if "state_slots" in host:
            host["state_slots"][:num_reqs] = [request.state_slots[0] for request in step.requests]
            host["prompt_lens"][:num_reqs] = packed["prompt"]
        if "kept_slots" in host:
            fill_kept(host["kept_slots"], step, start)
        np.add(computed, query, out=host["seq_lens"][:num_reqs])
        host["remaining"][:num_reqs] = step.remaining
        host["sources"][:num_reqs] = columns.sources
        host["active"][:num_reqs] = True
        self._fill_groups(step.shared, num_reqs)

    def fill_edits(self, step: Rows) -> None:
        """Write what requests forbid and prefer, from their tokens; padding does neither."""
        if "allowed" not in self.arrays:
            return
        if self.edits_uploaded is not None:
            self.edits_uploaded.synchronize()
        self._pad_edits(len(step))
        host, repeats = self.arrays, self.query_len or 1
        for number, s in enumerate(step):
            rows = host["allowed"][number * repeats : (number + 1) * repeats]
            if s.request.finish_reason is None:
                s.request.fill_allowed(rows, s.draft)
            else:  # it has ended since the model was launched: nobody takes its token
                rows[:] = -1
            bias = {} if s.request.edits is None else s.request.edits.bias
            ids, values = host["bias_ids"][number], host["bias_values"][number]
            ids[:], values[:] = 0, 0.0
            ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
            host["min_lengths"][number] = len(s.request.prompt) + s.request.min_tokens

    def _pad_edits(self, num_reqs: int) -> None:
        """Of rows behind these: they forbid and prefer nothing."""
        if "allowed" in self.arrays:
            self.arrays["allowed"][num_reqs * (self.query_len or 1) :] = -1
            for name in ("bias_ids", "bias_values", "min_lengths"):
                self.arrays[name][num_reqs:] = 0

    def _fill_groups(self, shared: SharedPrefixes | None, num_reqs: int) -> None:
        """Groups of requests that share a prefix; padding is one more, without."""
        lens, starts = self.arrays["shared_lens"], self.arrays["group_starts"]
        lens[:] = 0
        starts[:] = self.num_reqs
        starts[0] = 0
        if shared is not None:
            lens[:num_reqs] = shared.lens
            starts[: shared.starts.size] = shared.starts

    @property
    def num_groups(self) -> int:
        """Of requests that share a prefix, on the host side, padding included; 0: none do."""
        if not self.arrays["shared_lens"].any():
            return 0
        return int((self.arrays["group_starts"] < self.num_reqs).sum())

    def _fill_blocks(self, name: str, blocks: BlockRows, rows: np.ndarray) -> None:
        """Write the rows of a block table that have changed."""
        number, versions, held = rows.size, blocks.versions[rows], self.versions[name]
        (changed,) = np.nonzero(versions != held[:number])
        if changed.size == number:
            np.take(blocks.blocks, rows, axis=0, out=self.arrays[name][:number])
        elif changed.size:
            self.arrays[name][changed] = blocks.blocks[rows[changed]]
        held[:number] = versions

    def _fill_tokens(self, step: Rows, start: np.ndarray) -> None:
        """Tokens that the host knows; those of decodes at once, others request by request."""
        ids = self.arrays["input_ids"][0]
        if step.query_len == 1:
            if (step.columns.sources < 0).any():  # the device has the tokens of the others
                ids[: len(step)] = [(r.token_ids or r.prompt)[-1] for r in step.requests]
            return
        for s, begin in zip(step, start[:-1].tolist(), strict=True):
            first, end = s.num_computed, s.num_computed + s.num_tokens
            if s.source < 0 and end <= len(s.request.prompt) and not s.draft:
                ids[begin : begin + s.num_tokens] = s.request.prompt_array[first:end]
            else:
                ids[begin : begin + s.num_tokens] = s.tokens()

    def _fill_places(
        self,
        query: np.ndarray,
        computed: np.ndarray,
        start: np.ndarray,
        rooms: Sequence[np.ndarray],
        last: np.ndarray,
        block_size: int,
    ) -> None:
        """Positions and slots of all rows; the block tables are there.

        Drafts may go on after the last position that a request computes, and after the last block.
        Nobody wants those rows, but a position is an index, and of some models (longrope, dynamic
        RoPE) all rows depend on the largest.
        """
        host, num_reqs, num_tokens = self.arrays, query.size, int(start[-1])
        if num_tokens == num_reqs:
            positions, request = computed, np.arange(num_reqs)
        else:
            positions = positions_of_step(query, computed, start)
            request = np.repeat(np.arange(num_reqs), query)
            last = last[request]
        shift = last // SHIFT * SHIFT
        np.minimum(positions + shift, last, out=host["position_ids"][0, :num_tokens])
        block, offset = np.divmod(positions, block_size)
        for name, room in zip(self.versions, rooms, strict=True):
            table = host[name][:num_reqs]
            slots = table[request, block].astype(np.int64) * block_size + offset
            outside = positions >= room[request]
            host[TABLES[name]][:num_tokens] = np.where(outside, PAD_SLOT_ID, slots)

    def _most_logits(self, count: int) -> int:
        """Rows of logits of a request at most, of `count` in all, on the host side."""
        rows, starts = self.arrays["logits_indices"][:count], self.arrays["query_start_loc"]
        number = np.searchsorted(starts, rows, side="right")
        return int(np.bincount(number).max(initial=1))

    def groups(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device: shared tokens of each request [S], and starts of groups [number + 1]."""
        return self.device["shared_lens"], self.device["group_starts"][: number + 1]

    def upload(self, *, edits: bool = True) -> None:
        """Copy the host side but for `tokens` to the device, without waiting for it.

        `edits` False leaves those for `upload_edits`.
        """
        device, host = self.device_bytes, self.host_bytes
        number = self.num_uploaded if edits else self.num_early
        device[:number].copy_(host[:number], non_blocking=True)
        for event in (self.uploaded, self.edits_uploaded if edits else None):
            if event is not None:
                event.record()

    def upload_edits(self) -> None:
        """Copy the edits alone."""
        device, host = self.device_bytes, self.host_bytes
        edits = slice(self.num_early, self.num_uploaded)
        device[edits].copy_(host[edits], non_blocking=True)
        if self.edits_uploaded is not None:
            self.edits_uploaded.record()

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
        """The fields of `graphs.sampling.FIELDS`, on the device, one entry a row that is drawn."""
        return self._by_row(FIELDS)

    def edits(self) -> Mapping[str, torch.Tensor] | None:
        """What `edited` takes, on the device, one entry a row that is drawn; None: nothing."""
        if "allowed" not in self.device:
            return None
        names = ("bias_ids", "bias_values", "min_lengths", "stop_tokens")
        return {"allowed": self.device["allowed"], **self._by_row(names)}

    def _by_row(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        repeats, fields = self.query_len or 1, {name: self.device[name] for name in names}
        if repeats == 1:
            return fields
        return {name: x.repeat_interleave(repeats, dim=0) for name, x in fields.items()}

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
                logits["max_logits_per_req"] = self._most_logits(count)
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
            window_block_table_tensor=self.device.get("window_block_table"),
            window_slot_mapping=self.device.get("window_slot_mapping"),
            **mirrors,  # pyright: ignore[reportArgumentType]
            **logits,
        )


def _layout(
    num_tokens: int, num_reqs: int, num_rows: int, max_blocks: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every field; see `StepTensors.allocate`."""
    return {
        "input_ids": ((1, num_tokens), torch.int64),
        "position_ids": ((1, num_tokens), torch.int64),
        "slot_mapping": ((num_tokens,), torch.int64),
        "window_slot_mapping": ((num_tokens,), torch.int64),
        "logits_indices": ((num_rows,), torch.int64),
        "query_start_loc": ((num_reqs + 1,), torch.int32),
        "seq_lens": ((num_reqs,), torch.int32),
        "block_table": ((num_reqs, max_blocks), torch.int32),
        "window_block_table": ((num_reqs, max_blocks), torch.int32),
        **{name: ((num_reqs,), dtype) for name, (dtype, _) in FIELDS.items()},
        "stop_tokens": ((num_reqs, MAX_STOP_TOKENS), torch.int64),
        "remaining": ((num_reqs,), torch.int32),
        "state_slots": ((num_reqs,), torch.int32),
        "prompt_lens": ((num_reqs,), torch.int32),
        "kept_slots": ((num_tokens,), torch.int32),
        "active": ((num_reqs,), torch.bool),
        "sources": ((num_reqs,), torch.int32),
        "step": ((1,), torch.int64),
        "num_logits": ((1,), torch.int32),
        "shared_lens": ((num_reqs,), torch.int32),
        "group_starts": ((2 * num_reqs + 1,), torch.int32),
    }


def _align(num_bytes: int) -> int:
    """Sections start at multiples of 16 bytes, which kernels read fastest."""
    return -(-num_bytes // 16) * 16


def _views(
    block: torch.Tensor, layout: dict[str, tuple[tuple[int, ...], torch.dtype]], sizes: list[int]
) -> dict[str, torch.Tensor]:
    typed = {dtype: block.view(dtype) for dtype in {dtype for _, dtype in layout.values()}}
    views, begin = {}, 0
    for (name, (shape, dtype)), size in zip(layout.items(), sizes, strict=True):
        strides = [math.prod(shape[i:]) for i in range(1, 1 + len(shape))]
        views[name] = typed[dtype].as_strided(shape, strides, begin // dtype.itemsize)
        begin += size
    return views
