"""A step's metadata for latent attention: which rows take which way, and their chunks of keys.

S requests, T rows of the batch, s requests of a chunk, M blocks a request may own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.backends.mla.plan import (
    ChunkOfKeys,
    PrefillPlan,
    Rows,
    cumulative,
    plan_prefill,
    takes_decode_way,
)
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
)
from attn_ops.metadata.attention import AttentionBackend

RowsOfBatch = slice | torch.Tensor
"""Neighbouring rows of a batch, or any: [n] int64 on the device."""


@dataclasses.dataclass(frozen=True, eq=False)
class DecodePart:
    """Requests that take the decode way."""

    rows: RowsOfBatch
    common: CommonAttentionMetadata  # these requests as a batch
    plan: Any = None  # of the backend's kernel, see `MLAMetadataBuilder.plan_decode`


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Keys that are gathered, up-projected and attended to together, by neighbouring rows."""

    rows: slice  # of the part's
    causal: bool
    merges: bool  # the rows see other keys besides: the log-sum-exp is needed
    cu_rows: torch.Tensor  # [s+1] int32, device: first row of each request, from 0
    cu_keys: torch.Tensor  # [s+1] int32, device: first key of each request, from 0
    starts: torch.Tensor  # [s] int32, device: position of each request's first key
    block_table: torch.Tensor  # [s, M] int32, device
    num_keys: int
    max_rows: int  # of one request
    max_keys: int


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillPart:
    """Requests that take the prefill way."""

    rows: RowsOfBatch
    requests: tuple[int, ...]  # in the batch's order
    chunks: tuple[Chunk, ...]  # the causal ones first; each row is in one of those
    workspace: MLAWorkspace
    plan: PrefillPlan


@dataclasses.dataclass(frozen=True, eq=False)
class MLAPlan:
    """What `MLAMetadataBuilder` plans for a batch."""

    batch: CommonAttentionMetadata
    decode: DecodePart | None
    prefill: PrefillPart | None
    num_rows: int  # rows of the batch that belong to a request, where the host knows; else T

    @property
    def decode_metadata(self) -> CommonAttentionMetadata | None:
        """The requests that take the decode way, as a batch; None: there are none."""
        return None if self.decode is None else self.decode.common

    # Cached: no kernel reads it, so it is made for those who ask.
    @functools.cached_property
    def prefill_metadata(self) -> CommonAttentionMetadata | None:
        """The same of the prefill way."""
        if self.prefill is None:
            return None
        return batch_of(self.batch, self.prefill.requests)


def all_decode(common: CommonAttentionMetadata, plan: Any = None) -> MLAPlan:
    """Every request takes the decode way; nothing is copied, so that it can be captured."""
    rows = common.slot_mapping.shape[0]
    return MLAPlan(common, DecodePart(slice(None), common, plan), None, rows)


class MLAMetadataBuilder(AttentionMetadataBuilder):
    """Splits batches by the way each request takes (`takes_decode_way`), in any order.

    Where the host does not know the lengths, as under capture, all take the decode way.

    Args:
        workspace: where the prefill way gathers latents; None: the builder makes one of 64 Ki
            tokens when the first prefill comes.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    plans_on_host = True

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        block_size: int,
        device: torch.device | str,
        *,
        workspace: MLAWorkspace | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(backend, specs, block_size, device, **keywords)
        self._workspace: MLAWorkspace | None = None
        if workspace is not None:
            self.workspace = workspace

    @property
    def workspace(self) -> MLAWorkspace:
        """That of the caller, or the builder's own, made now if there is none."""
        if self._workspace is None:
            self._workspace = MLAWorkspace(self.specs, device=self.device)
        return self._workspace

    @workspace.setter
    def workspace(self, workspace: MLAWorkspace) -> None:
        workspace.check(self.specs, self.block_size, self.device)
        self._workspace = workspace

    def profile_run(self, max_num_tokens: int) -> int:
        """Reserve what a step of so many rows takes at most; bytes of it. See `MLAWorkspace`."""
        return self.workspace.reserve(max_num_tokens)

    def plan_decode(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> Any:
        """What the backend's decode kernel is given for a part; capturable."""
        return None

    def plan(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> MLAPlan:
        starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu
        if starts is None or seq_lens is None:
            return self._all_decode(spec, common)
        decodes, prefills = split_ways(starts.tolist(), seq_lens.tolist())
        if not prefills:
            return self._all_decode(spec, common)
        decode = None
        if any(r.count for r in decodes):
            part = batch_of(common, tuple(r.request for r in decodes))
            rows = rows_of_batch(decodes, common.device)
            decode = DecodePart(rows, part, self.plan_decode(spec, part))
        prefill = self._prefill(prefills, common)
        return MLAPlan(common, decode, prefill, int(starts[-1]))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """All take the decode way: which way would be frozen, and the lengths are not known."""
        unknown = dict.fromkeys(("seq_lens_cpu", "num_computed_tokens_cpu"))
        return self.build(0, common_attn_metadata.replace(**unknown))

    def _all_decode(self, spec: AttentionSpec, common: CommonAttentionMetadata) -> MLAPlan:
        return all_decode(common, self.plan_decode(spec, common))

    def _prefill(self, prefills: list[Rows], common: CommonAttentionMetadata) -> PrefillPart:
        planned = plan_prefill(prefills, self.workspace.num_tokens, self.block_size)
        return PrefillPart(
            rows_of_batch(planned.rows, common.device),
            tuple(r.request for r in prefills),
            chunks_of(planned, common),
            self.workspace,
            planned,
        )


def split_ways(starts: list[int], seq_lens: list[int]) -> tuple[list[Rows], list[Rows]]:
    """Requests of the decode way and of the prefill way.

    A request without rows goes where the one before it went, so that neighbours stay neighbours.
    """
    decodes: list[Rows] = []
    prefills: list[Rows] = []
    last = decodes
    for request, seq_len in enumerate(seq_lens):
        rows = Rows(request, starts[request], starts[request + 1] - starts[request], seq_len)
        if rows.count:
            last = decodes if takes_decode_way(rows.count, seq_len) else prefills
        if rows.count or last is decodes:
            last.append(rows)
    return decodes, prefills


def rows_of_batch(parts: Sequence[Rows], device: torch.device) -> RowsOfBatch:
    """All rows of some requests: a slice where they are neighbours, in their order."""
    ranges = [range(r.first, r.first + r.count) for r in parts if r.count]
    if all(a.stop == b.start for a, b in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop) if ranges else slice(0, 0)
    rows = torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in ranges])
    return rows.to(device, non_blocking=True)


def batch_of(common: CommonAttentionMetadata, requests: tuple[int, ...]) -> CommonAttentionMetadata:
    """Some requests of a batch, whose lengths the host knows, as a batch of their own."""
    starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu
    assert starts is not None, "the builder splits no other batch"
    assert seq_lens is not None, "the same"
    rows = [
        Rows(i, int(starts[i]), int(starts[i + 1] - starts[i]), int(seq_lens[i])) for i in requests
    ]
    start_cpu = torch.tensor(cumulative(r.count for r in rows), dtype=torch.int32, device="cpu")
    seq_cpu = torch.tensor([r.seq_len for r in rows], dtype=torch.int32, device="cpu")
    taken = _requests(common, requests)
    index = rows_of_batch(rows, common.device)
    return CommonAttentionMetadata(
        query_start_loc=start_cpu.to(common.device, non_blocking=True),
        query_start_loc_cpu=start_cpu,
        seq_lens=common.seq_lens[taken],
        seq_lens_cpu=seq_cpu,
        num_reqs=len(rows),
        num_actual_tokens=int(start_cpu[-1]),
        max_query_len=max((r.count for r in rows), default=0),
        max_seq_len=max((r.seq_len for r in rows), default=0),
        block_table_tensor=common.block_table_tensor[taken],
        slot_mapping=common.slot_mapping[index],
        causal=common.causal,
        block_size=common.block_size,
    )


def _requests(common: CommonAttentionMetadata, requests: Sequence[int]) -> RowsOfBatch:
    """An index of requests: a slice where they are neighbours."""
    if list(requests) == list(range(requests[0], requests[0] + len(requests))):
        return slice(requests[0], requests[0] + len(requests))
    return torch.tensor(requests, device="cpu").to(common.device, non_blocking=True)


def chunks_of(planned: PrefillPlan, common: CommonAttentionMetadata) -> tuple[Chunk, ...]:
    """The planned chunks with what their kernels read; one upload for all of them."""
    first_rows = dict(zip(planned.rows, cumulative(r.count for r in planned.rows), strict=False))
    numbers = []
    for chunk in planned.chunks:
        numbers += [cumulative(k.rows.count for k in chunk.keys), chunk.cu_keys]
        numbers += [[k.start for k in chunk.keys]]
    flat = torch.tensor([n for part in numbers for n in part], dtype=torch.int32, device="cpu")
    uploaded = iter(flat.to(common.device, non_blocking=True).split([len(n) for n in numbers]))
    return tuple(
        _chunk(
            chunk,
            first_rows[chunk.keys[0].rows],
            common,
            *(next(uploaded) for _ in range(3)),
        )
        for chunk in planned.chunks
    )


def _chunk(
    chunk: ChunkOfKeys,
    first_row: int,
    common: CommonAttentionMetadata,
    cu_rows: torch.Tensor,
    cu_keys: torch.Tensor,
    starts: torch.Tensor,
) -> Chunk:
    requests = [k.rows.request for k in chunk.keys]
    return Chunk(
        slice(first_row, first_row + sum(k.rows.count for k in chunk.keys)),
        chunk.causal,
        not chunk.causal or any(k.start for k in chunk.keys),
        cu_rows,
        cu_keys,
        starts,
        common.block_table_tensor[_requests(common, requests)],
        chunk.num_keys,
        max(k.rows.count for k in chunk.keys),
        chunk.max_keys,
    )
