"""Names of vLLM's metadata that callers outside use; nothing here imports this file.

`attn_ops.metadata` hands them on. docs/by_hand.md says where each differs from vLLM's.

S requests, T rows, Q query tokens of each request, N query heads, H head size.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from attn_ops.metadata.chunked_local import make_local_attention_virtual_batches
from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.fast_prefill import (
    check_last_rows,
    logits_rows_of,
    make_kv_sharing_fast_prefill_common_attn_metadata,
)
from attn_ops.metadata.positions import PAD_SLOT_ID
from attn_ops.metadata.validation import check_apart, check_int, check_tensor

__all__ = [
    "KV_SHARING_FAST_PREFILL_METADATA_FIELDS",
    "KVSharingFastPrefillMetadata",
    "PerLayerParameters",
    "UBatchSlice",
    "_make_metadata_with_slice",
    "compute_causal_conv1d_metadata",
    "create_fast_prefill_custom_backend",
    "get_dcp_local_seq_lens",
    "get_per_layer_parameters",
    "group_layers_by_parameters",
    "infer_global_hyperparameters",
    "make_local_attention_virtual_batches_and_block_table",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "slice_query_start_locs",
    "split_attn_metadata",
    "split_prefill_chunks",
    "subclass_attention_backend",
    "subclass_attention_metadata",
]


@dataclasses.dataclass
class UBatchSlice:
    """Requests and rows of one micro-batch: slices with start and stop, without a step."""

    request_slice: slice
    token_slice: slice

    def is_empty(self) -> bool:
        return any(s.start == s.stop for s in (self.request_slice, self.token_slice))

    @property
    def num_tokens(self) -> int:
        return self.token_slice.stop - self.token_slice.start


def slice_query_start_locs(query_start_loc: torch.Tensor, request_slice: slice) -> torch.Tensor:
    """[requests of the slice + 1]: query_start_loc of some requests, from 0. A new tensor.

    Raises:
        ValueError: the slice has no int start and stop, a step, or leaves the batch.
    """
    _check_part("request_slice", request_slice, query_start_loc.shape[0] - 1, least=0)
    start, stop = request_slice.start, request_slice.stop
    return query_start_loc[start : stop + 1] - query_start_loc[start]


def split_attn_metadata(
    ubatch_slices: Sequence[UBatchSlice], common_attn_metadata: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    """One batch per slice; `common_attn_metadata` is not changed. Errors as for one slice."""
    return [_make_metadata_with_slice(s, common_attn_metadata) for s in ubatch_slices]


def _make_metadata_with_slice(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """The batch that `ubatch_slice` cuts out, on the device without reading it.

    Of a request cut in two, the first part ends where the slice does (its seq_len is shorter by the
    tokens left out) and the second part counts the tokens before it as computed. Query offsets are
    new tensors; the rest are views, and seq_lens a copy where the last request is cut. A slice that
    holds the last request may run on into padding rows. Logits indices are kept where the host
    knows them; dcp_local_seq_lens is kept unless the last request is cut.

    Raises:
        ValueError: the slice is empty, out of the batch, or its rows are not those of its requests.
    """
    start_cpu = attn_metadata.query_start_loc_cpu
    if start_cpu is None:
        raise ValueError("query_start_loc_cpu must be given to cut a batch, got None")
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    _check_slices(ubatch_slice, attn_metadata, start_cpu.numpy())
    total = int(start_cpu[requests.stop])
    begin, end = tokens.start, min(tokens.stop, total)
    cut = total - end  # tokens of the last request that the next slice has
    starts = slice(requests.start, requests.stop + 1)
    new_start_cpu = start_cpu[starts].clamp(begin, end) - begin
    query = np.diff(new_start_cpu.numpy())
    seq_cpu = _shortened(attn_metadata.seq_lens_cpu, requests, cut)
    computed = attn_metadata.num_computed_tokens_cpu
    if computed is not None:
        computed = computed[requests].clone()
        computed[0] += begin - int(start_cpu[requests.start])
    if computed is not None and seq_cpu is not None:
        computed = torch.minimum(computed, seq_cpu)  # 0 for padding, whose rows hold no tokens
    changes = _logits_of_slice(attn_metadata, begin, end)
    return attn_metadata.replace(
        query_start_loc=attn_metadata.query_start_loc[starts].clamp(begin, end) - begin,
        query_start_loc_cpu=new_start_cpu,
        seq_lens=_shortened(attn_metadata.seq_lens, requests, cut),
        seq_lens_cpu=seq_cpu,
        num_computed_tokens_cpu=computed,
        num_reqs=requests.stop - requests.start,
        num_actual_tokens=end - begin,
        max_query_len=int(query.max()) or attn_metadata.max_query_len,
        max_seq_len=attn_metadata.max_seq_len if seq_cpu is None else int(seq_cpu.max()),
        block_table_tensor=attn_metadata.block_table_tensor[requests],
        slot_mapping=attn_metadata.slot_mapping[tokens],
        encoder_seq_lens=_part(attn_metadata.encoder_seq_lens, requests),
        seq_lens_cpu_upper_bound=_shortened(attn_metadata.seq_lens_cpu_upper_bound, requests, cut),
        is_prefilling=_part(attn_metadata.is_prefilling, requests),
        dcp_local_seq_lens=None if cut else _part(attn_metadata.dcp_local_seq_lens, requests),
        positions=_part(attn_metadata.positions, tokens),
        num_logits=None,
        window_block_table_tensor=_part(attn_metadata.window_block_table_tensor, requests),
        window_slot_mapping=_part(attn_metadata.window_slot_mapping, tokens),
        **changes,
    )


def _check_slices(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata, start: np.ndarray
) -> None:
    """Raise a ValueError unless the rows of the slice belong to its first to its last request."""
    rows = attn_metadata.slot_mapping.shape[0]
    for name, part, size in (
        ("request_slice", ubatch_slice.request_slice, attn_metadata.num_reqs),
        ("token_slice", ubatch_slice.token_slice, rows),
    ):
        _check_part(name, part, size, least=1)
    first, last = ubatch_slice.request_slice.start, ubatch_slice.request_slice.stop - 1
    begin, end = ubatch_slice.token_slice.start, ubatch_slice.token_slice.stop
    # A request without query tokens owns the empty range at its start.
    begins_inside = start[first] <= begin < start[first + 1] or begin == start[first]
    ends_inside = start[last] < end <= start[last + 1] or end == start[last + 1]
    if last + 1 == attn_metadata.num_reqs:
        ends_inside = ends_inside or end > start[-1]
    if not begins_inside:
        raise ValueError(
            f"token_slice must start in the rows {start[first]} to {start[first + 1] - 1} of its "
            f"first request {first}, got {begin}"
        )
    if not ends_inside:
        raise ValueError(
            f"token_slice must stop in the rows {start[last]} to {start[last + 1] - 1} of its "
            f"last request {last}, got {end}"
        )


def _check_part(name: str, part: slice, size: int, least: int) -> None:
    """Raise a ValueError unless `part` is a slice of `least` entries or more within 0 to `size`."""
    ends = (part.start, part.stop)
    if part.step is not None or not all(isinstance(end, (int, np.integer)) for end in ends):
        raise ValueError(f"{name} must have an int start and stop and no step, got {part}")
    if part.start < 0 or not (part.start + least <= part.stop <= size):
        what = "and not empty, " if least else ""
        raise ValueError(f"{name} must be a part of 0 to {size} {what}got {part}")


def _part(field: Any, entries: slice) -> Any:
    return None if field is None else field[entries]


def _shortened(lengths: Any, requests: slice, cut: int) -> Any:
    """Lengths of the slice's requests, the last one shorter by `cut`; a view if nothing is cut."""
    if lengths is None or cut == 0:
        return _part(lengths, requests)
    lengths = lengths[requests].clone()
    lengths[-1:].sub_(cut).clamp_(min=0)  # a padding request has no tokens to leave out
    return lengths


def _logits_of_slice(
    attn_metadata: CommonAttentionMetadata, begin: int, end: int
) -> dict[str, Any]:
    """Fields about logits, counted from the slice's first row; None where the host cannot know."""
    rows_cpu = attn_metadata.logits_indices_cpu
    padded = attn_metadata.logits_indices_padded
    count = attn_metadata.num_logits_indices
    if rows_cpu is None and count is not None and padded is not None and padded.is_cpu:
        rows_cpu = padded[:count]
    if rows_cpu is None or attn_metadata.num_logits is not None:
        names = ("logits_indices", "logits_indices_cpu", "logits_indices_padded")
        return dict.fromkeys((*names, "num_logits_indices"))
    kept = rows_cpu[(rows_cpu >= begin) & (rows_cpu < end)] - begin
    on_device = kept.to(attn_metadata.device, non_blocking=True, copy=True)
    return {
        "logits_indices_cpu": kept,
        "logits_indices": None
        if attn_metadata.logits_indices is None
        else on_device.to(torch.int64, copy=True),
        "logits_indices_padded": None if padded is None else on_device.to(padded.dtype),
        "num_logits_indices": None if padded is None else kept.shape[0],
    }


@dataclasses.dataclass(frozen=True)
class PerLayerParameters:
    """What FlashInfer's plan must know of a layer beyond its geometry."""

    window_left: int  # keys to the left of the query's own that it sees; -1: all
    logits_soft_cap: float | None  # c in c * tanh(s / c); None: none
    sm_scale: float  # factor on q.k
    has_sinks: bool = False  # the softmax has a learned extra term


def get_per_layer_parameters(
    layers: Mapping[str, Any], layer_names: Sequence[str], cls_: type | None = None
) -> dict[str, PerLayerParameters]:
    """Parameters of some layers, by name.

    Args:
        layers: attention layers by name. A layer, or its `impl` if it has one, has `scale` and may
            have `sliding_window` (keys to the left and right; or one number that counts the query's
            own, as in `AttentionSpec`; or None), `logits_soft_cap` or, as `attn_ops.Attention`,
            `soft_cap`, and `sinks`.
        layer_names: those wanted.
        cls_: type that each must be of; None: any.

    Raises:
        ValueError: a name is unknown, or its layer is of another type or lacks `scale`.
    """
    parameters = {}
    for name in layer_names:
        if name not in layers:
            known = ", ".join(layers) or "none"
            raise ValueError(f"layer_names must be names of layers, got {name!r}; known: {known}")
        impl = getattr(layers[name], "impl", layers[name])
        if cls_ is not None and not isinstance(impl, cls_):
            raise ValueError(
                f"layer {name!r} must be of type {cls_.__name__}, got {type(impl).__name__}"
            )
        if getattr(impl, "scale", None) is None:
            raise ValueError(f"layer {name!r} must have a scale, got {type(impl).__name__} without")
        window = getattr(impl, "sliding_window", None)
        parameters[name] = PerLayerParameters(
            window_left=_window_left(window),
            logits_soft_cap=_soft_cap(impl),
            sm_scale=impl.scale,
            has_sinks=getattr(impl, "sinks", None) is not None,
        )
    return parameters


def _soft_cap(impl: Any) -> float | None:
    """By vLLM's name of it, or else by that of `attn_ops.Attention`."""
    cap = getattr(impl, "logits_soft_cap", None)
    return getattr(impl, "soft_cap", None) if cap is None else cap


def _window_left(window: Any) -> int:
    if window is None:
        return -1
    return window - 1 if isinstance(window, int) else window[0]


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises:
        ValueError: there is no layer, or one differs; it is named with what it differs in.
            `group_layers_by_parameters` gives one plan per group instead.
    """
    if not per_layer_params:
        raise ValueError("per_layer_params must name at least one layer, got none")
    first_name, first = next(iter(per_layer_params.items()))
    for name, parameters in per_layer_params.items():
        for field in dataclasses.fields(parameters):
            ours, theirs = getattr(first, field.name), getattr(parameters, field.name)
            if ours != theirs:
                raise ValueError(
                    f"layers must share {field.name}, got {ours} in {first_name!r} and {theirs} "
                    f"in {name!r}; supported: one plan per group of group_layers_by_parameters"
                )
    return first


def group_layers_by_parameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> dict[PerLayerParameters, list[str]]:
    """Names of the layers that share their parameters, in order of first appearance."""
    groups: dict[PerLayerParameters, list[str]] = {}
    for name, parameters in per_layer_params.items():
        groups.setdefault(parameters, []).append(name)
    return groups


KV_SHARING_FAST_PREFILL_METADATA_FIELDS: list[tuple[str, Any, Any]] = [
    ("logits_indices_padded", torch.Tensor | None, None),
    ("num_logits_indices", int, 0),
]
"""Name, type and default of the fields that `KVSharingFastPrefillMetadata` adds."""


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """A backend's metadata that carries the logits rows as well."""

    logits_indices_padded: torch.Tensor
    num_logits_indices: int


def create_fast_prefill_custom_backend(prefix: str, underlying_attn_backend: Any) -> Any:
    """A backend named `prefix` + the given one's, its metadata reduced to the logits rows.

    Its metadata satisfies `KVSharingFastPrefillMetadata`. Backends as `subclass_attention_backend`
    takes them.

    Raises:
        ValueError: when building, if the batch lacks logits rows, or the host sees that they are
            not the last rows of their requests: attention counts positions from a sequence's end.
    """
    underlying_builder: Any = underlying_attn_backend.get_builder_cls()

    class FastPrefillAttentionBuilder(underlying_builder):
        """Builds the underlying metadata from the reduced batch."""

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            padded, count = logits_rows_of(common_attn_metadata)
            check_last_rows(common_attn_metadata, padded, count)
            reduced = make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata)
            metadata = copy.copy(super().build(common_prefix_len, reduced, fast_build))
            # Past __setattr__: a metadata of another project may be a frozen dataclass.
            object.__setattr__(metadata, "logits_indices_padded", padded)
            object.__setattr__(metadata, "num_logits_indices", count)
            return metadata

    return subclass_attention_backend(prefix, underlying_attn_backend, FastPrefillAttentionBuilder)


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: Any, builder_cls: type
) -> Any:
    """A backend like the given one whose metadata `builder_cls` builds.

    Args:
        name_prefix: put before the name.
        attention_backend_cls: an `attn_ops.Backend`, or a class with `get_builder_cls`.
        builder_cls: what `get_builder_cls()` of the result returns.
    """
    if isinstance(attention_backend_cls, type):
        name = name_prefix + attention_backend_cls.__name__
        members = {"get_builder_cls": staticmethod(lambda: builder_cls)}
        return type(name, (attention_backend_cls,), members)
    name = name_prefix + attention_backend_cls.name
    return dataclasses.replace(attention_backend_cls, name=name, builder=builder_cls)


def subclass_attention_metadata(
    name_prefix: str, metadata_cls: Any, fields: Sequence[tuple[str, Any, Any]]
) -> Any:
    """A dataclass derived from `metadata_cls` with more fields, each (name, type, default).

    A frozen dataclass gives a frozen one. Defaults must be immutable, as in any dataclass.
    """
    params = getattr(metadata_cls, "__dataclass_params__", None)
    members = [(name, kind, dataclasses.field(default=value)) for name, kind, value in fields]
    return dataclasses.make_dataclass(
        name_prefix + metadata_cls.__name__,
        members,
        bases=(metadata_cls,),
        frozen=params.frozen if params else False,
    )


def reshape_query_for_spec_decode(query: torch.Tensor, batch_size: int) -> torch.Tensor:
    """[T, N, H] -> [S, Q, N, H] with S = `batch_size`: a view.

    An empty batch of no requests gives [0, 0, N, H].

    Raises:
        ValueError: query has another rank, or its rows do not divide by `batch_size`.
    """
    if query.dim() != 3:
        raise ValueError(
            f"query must have shape [num_tokens, num_heads, head_size], got {list(query.shape)}"
        )
    num_tokens = query.shape[0]
    if batch_size < 0 or (num_tokens % batch_size if batch_size else num_tokens):
        raise ValueError(f"batch_size must divide the {num_tokens} rows of query, got {batch_size}")
    query_len = num_tokens // batch_size if batch_size else 0
    return query.view(batch_size, query_len, *query.shape[1:])


def reshape_attn_output_for_spec_decode(attn_output: torch.Tensor) -> torch.Tensor:
    """[S, Q, N, H] -> [T, N, H]; a 3-D output is returned as it is. A view where strides allow.

    Raises:
        ValueError: attn_output has another rank.
    """
    if attn_output.dim() == 3:
        return attn_output
    if attn_output.dim() != 4:
        raise ValueError(
            "attn_output must have shape [batch_size, query_len, num_heads, head_size], "
            f"got {list(attn_output.shape)}"
        )
    return attn_output.flatten(0, 1)


BLOCK_M = 8
"""Tokens of one program."""

MIN_PROGRAMS = 1024


def compute_causal_conv1d_metadata(
    query_start_loc_p: torch.Tensor,
    *,
    query_start_loc_cpu: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    device: torch.device | str | None = None,
) -> tuple[dict[int, dict[str, Any]], torch.Tensor, torch.Tensor]:
    """Programs of BLOCK_M tokens each for a batch of prefills.

    Args:
        query_start_loc_p: [S+1] int32, first row of each prefill, cumulative.
        query_start_loc_cpu: its CPU mirror; needed if it is on a device, which is not read.
        out: batch_ptr and token_chunk_offset_ptr to write, int32, at least as long as there are
            programs; None allocates max(1024, programs) * 2 each.
        device: of those two; None: that of query_start_loc_p. vLLM 0.24 gives it with the mirror.

    Returns:
        nums_dict: for BLOCK_M, on the CPU: nums [S] (programs a prefill), tot (all), mlist [tot]
            int64 (prefill of each program), mlist_len, offsetlist [tot] int32 (which chunk of it),
            and the two tensors below.
        batch_ptr, token_chunk_offset_ptr: int32 on the device: mlist and offsetlist, PAD_SLOT_ID
            behind them.

    Raises:
        ValueError: the mirror is needed and not there, it falls, or `out` does not fit.
    """
    if query_start_loc_cpu is None and query_start_loc_p.is_cpu:
        query_start_loc_cpu = query_start_loc_p
    if query_start_loc_cpu is None:
        raise ValueError(
            f"query_start_loc_cpu must be given for a batch on {query_start_loc_p.device}, got None"
        )
    device = query_start_loc_p.device if device is None else torch.device(device)
    query = _query_lens(query_start_loc_cpu, query_start_loc_p)
    nums = -(-query // BLOCK_M)
    count = nums.numpy()
    mlist = np.repeat(np.arange(count.size), count)
    offset = np.arange(mlist.size) - np.repeat(np.cumsum(count) - count, count)
    size = max(MIN_PROGRAMS, mlist.size) * 2
    if out is None:
        packed = torch.empty(2, size, dtype=torch.int32, device=device)
        out = (packed[0], packed[1])
    names = ("batch_ptr", "token_chunk_offset_ptr")
    for name, target in zip(names, out, strict=True):
        check_tensor(f"out's {name}", target, (torch.int32,), (None,), device)
        if target.shape[0] < mlist.size:
            raise ValueError(
                f"out's {name} must have at least {mlist.size} entries, got {target.shape[0]}"
            )
    check_apart(**dict(zip(names, out, strict=True)))
    for target, values in zip(out, (mlist, offset), strict=True):
        target.fill_(PAD_SLOT_ID)
        target[: mlist.size].copy_(torch.from_numpy(values.astype(np.int32)), non_blocking=True)
    programs = {
        "nums": nums,
        "tot": int(mlist.size),
        "mlist": torch.from_numpy(mlist),
        "mlist_len": int(mlist.size),
        "offsetlist": torch.from_numpy(offset.astype(np.int32)),
        "batch_ptr": out[0],
        "token_chunk_offset_ptr": out[1],
    }
    return {BLOCK_M: programs}, *out


def _query_lens(start_cpu: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[S] int32, CPU."""
    if start_cpu.shape != start.shape:
        raise ValueError(
            f"query_start_loc_cpu must have shape {list(start.shape)}, got {list(start_cpu.shape)}"
        )
    query = start_cpu.diff()
    if (query < 0).any():
        raise ValueError(f"query_start_loc_p must never fall, got {start_cpu.tolist()}")
    return query


def split_prefill_chunks(
    seq_lens_cpu: torch.Tensor, workspace_size: int, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Neighbouring requests whose tokens fit into a workspace together (vLLM 0.24).

    Args:
        seq_lens_cpu: [S] tokens of each request, on the CPU.
        workspace_size: the most tokens of a chunk.
        request_offset: added to every index.

    Returns:
        First request of each chunk, and one past its last.

    Raises:
        ValueError: a request is longer than the workspace.
    """
    longest = int(seq_lens_cpu.max()) if seq_lens_cpu.numel() else 0
    if longest > workspace_size:
        raise ValueError(
            f"seq_lens_cpu must be at most workspace_size {workspace_size}, got {longest}"
        )
    totals = np.append(0, np.cumsum(seq_lens_cpu.numpy()))
    chunks, first = [], 0
    while first < len(seq_lens_cpu):
        end = int(np.searchsorted(totals, totals[first] + workspace_size, side="right")) - 1
        chunks.append((first + request_offset, end + request_offset))
        first = end
    return chunks


def get_dcp_local_seq_lens(
    seq_lens: torch.Tensor,
    dcp_size: int = 1,
    dcp_rank: int | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> torch.Tensor:
    """Tokens of each request in a rank's cache, with decode context parallelism (vLLM 0.24).

    Ranks are dealt runs of tokens in turn. Device arithmetic only.

    Args:
        seq_lens: [S] tokens of each request.
        dcp_size: ranks.
        dcp_rank: one of them; None: all.
        cp_kv_cache_interleave_size: tokens of a run.

    Returns:
        [S] int32 for one rank, else [S, dcp_size].

    Raises:
        ValueError: a number is out of its range.
    """
    check_int("dcp_size", dcp_size, 1)
    run = cp_kv_cache_interleave_size
    check_int("cp_kv_cache_interleave_size", run, 1)
    if dcp_rank is not None and not 0 <= dcp_rank < dcp_size:
        raise ValueError(f"dcp_rank must be from 0 to {dcp_size - 1}, got {dcp_rank}")
    ranks = range(dcp_size) if dcp_rank is None else (dcp_rank,)
    rounds = seq_lens.div(run * dcp_size, rounding_mode="floor")
    rest = seq_lens - rounds * (run * dcp_size)
    local = [rounds * run + (rest - rank * run).clamp(0, run) for rank in ranks]
    return torch.stack(local, dim=1).to(torch.int32).squeeze(1)


def make_local_attention_virtual_batches_and_block_table(
    attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int = 0
) -> tuple[CommonAttentionMetadata, Callable[[torch.Tensor], torch.Tensor]]:
    """Virtual batches, and a function from a batch's block table to theirs.

    This is the pair that `make_local_attention_virtual_batches` of vLLM 0.24 returns. The function
    serves layers whose cache has other blocks. Arguments and errors are those of ours.
    """

    def virtual(**changes: Any) -> CommonAttentionMetadata:
        common = common_attn_metadata.of_windows().replace(**changes)
        return make_local_attention_virtual_batches(attn_chunk_size, common, block_size)

    return virtual(), lambda table: virtual(block_table_tensor=table).block_table_tensor
