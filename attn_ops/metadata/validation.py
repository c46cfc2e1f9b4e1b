"""What a batch's metadata must look like: its form, checked when it is made, and its values.

S requests, T rows, M blocks a request may own.
"""

import itertools
from typing import Any

import numpy as np
import torch

_INT32, _INT64, _INDICES = (torch.int32,), (torch.int64,), (torch.int32, torch.int64)

_FORMS: dict[str, tuple[tuple[torch.dtype, ...], tuple[str, ...]]] = {
    "query_start_loc": (_INT32, ("S+1",)),
    "seq_lens": (_INT32, ("S",)),
    "block_table_tensor": (_INT32, ("S", "any")),
    "slot_mapping": (_INT64, ("any",)),
    "query_start_loc_cpu": (_INT32, ("S+1",)),
    "seq_lens_cpu": (_INT32, ("S",)),
    "num_computed_tokens_cpu": (_INT32, ("S",)),
    "seq_lens_cpu_upper_bound": (_INT32, ("S",)),
    "logits_indices": (_INT64, ("any",)),
    "logits_indices_padded": (_INDICES, ("any",)),
    "logits_indices_cpu": (_INDICES, ("any",)),
    "num_logits": (_INT32, ("1",)),
    "dcp_local_seq_lens": (_INT32, ("S",)),
    "is_prefilling": ((torch.bool,), ("S",)),
    "positions": (_INT64, ("any",)),
    "window_block_table_tensor": (_INT32, ("S", "any")),
    "window_slot_mapping": (_INT64, ("any",)),
}
"""Dtypes and shape of each tensor; those with `_cpu` in their name live on the CPU, `is_prefilling`
anywhere, all others on the device of seq_lens. Fields that are None are not checked."""

_CPU = torch.device("cpu")

Batch = Any
"""A `CommonAttentionMetadata`, whose module imports this one."""


def check_form(common: Batch) -> None:
    """Raise a ValueError that names the first field of a wrong dtype, device or shape."""
    for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
        check_int(name, getattr(common, name), 0)
    device = common.seq_lens.device
    sizes = {"S": common.num_reqs, "S+1": common.num_reqs + 1, "1": 1, "any": None}
    for name, (dtypes, shape) in _FORMS.items():
        tensor = getattr(common, name)
        if tensor is not None:
            place = tensor.device if name == "is_prefilling" else device
            place = _CPU if "_cpu" in name else place
            check_tensor(name, tensor, dtypes, tuple([sizes[size] for size in shape]), place)
    if (common.window_block_table_tensor is None) != (common.window_slot_mapping is None):
        raise ValueError(
            "window_block_table_tensor and window_slot_mapping must both be given or both be None, "
            "got one of them"
        )


def check_values(
    common: Batch,
    num_blocks: int | None,
    block_size: int | None,
    read_device: bool,
) -> None:
    """Raise a ValueError that names the first value of the batch which is not possible."""
    readable = read_device or common.device.type == "cpu"
    _check_counts(common)
    if readable:
        _check_mirrors(common)
    starts = _host(common.query_start_loc_cpu, common.query_start_loc, readable)
    seq = _host(common.seq_lens_cpu, common.seq_lens, readable)
    if starts is not None:
        _check_starts(common, starts)
    if starts is not None and seq is not None:
        _check_lengths(common, np.diff(starts), seq)
    if readable and seq is not None:
        check_blocks(common, seq, num_blocks, block_size)
        _check_slots(common, num_blocks, block_size)
        if starts is not None:
            _check_padding(common, starts, seq)
    _check_logits(common, readable)


def _host(
    mirror: torch.Tensor | None, tensor: torch.Tensor | None, readable: bool
) -> np.ndarray | None:
    """The values, from the mirror where there is one; None where they may not be read."""
    if mirror is not None:
        return mirror.numpy()
    return tensor.cpu().numpy() if tensor is not None and readable else None


def _refuse(bad: np.ndarray, name: str, values: np.ndarray, must: str) -> None:
    """Raise for the first True of `bad`: '`name` must `must`, got `name`[i]=v'."""
    if bad.any():
        at = np.unravel_index(int(np.argmax(bad)), bad.shape)
        index = "".join(f"[{int(i)}]" for i in at)
        raise ValueError(f"{name} must {must}, got {name}{index}={values[at]}")


def _check_mirrors(common: Batch) -> None:
    for name in ("query_start_loc", "seq_lens"):
        mirror = getattr(common, f"{name}_cpu")
        if mirror is not None:
            device = getattr(common, name).cpu().numpy()
            _refuse(mirror.numpy() != device, f"{name}_cpu", mirror.numpy(), f"equal {name}")
    padded, rows_cpu = common.logits_indices_padded, common.logits_indices_cpu
    if padded is not None and rows_cpu is not None:
        rows = padded[: rows_cpu.shape[0]].cpu().numpy()
        _refuse(
            rows_cpu.numpy() != rows,
            "logits_indices_cpu",
            rows_cpu.numpy(),
            "equal logits_indices_padded",
        )


def _check_counts(common: Batch) -> None:
    """Sizes that have to agree with each other, whatever the values are."""
    padded, rows_cpu = common.logits_indices_padded, common.logits_indices_cpu
    count = common.num_logits_indices
    if padded is not None and count is not None and not 0 <= count <= padded.shape[0]:
        raise ValueError(
            f"num_logits_indices must be from 0 to {padded.shape[0]}, the length of "
            f"logits_indices_padded, got {count}"
        )
    if padded is not None and rows_cpu is not None and rows_cpu.shape[0] != count:
        raise ValueError(
            f"logits_indices_cpu must have num_logits_indices={count} entries, "
            f"got {rows_cpu.shape[0]}"
        )
    rows = common.slot_mapping.shape[0]
    for name in ("positions", "window_slot_mapping"):
        tensor = getattr(common, name)
        if tensor is not None and tensor.shape[0] != rows:
            raise ValueError(
                f"{name} must have {rows} entries like slot_mapping, got {tensor.shape[0]}"
            )
    encoder = common.encoder_seq_lens
    if encoder is not None and len(encoder) != common.num_reqs:
        raise ValueError(
            f"encoder_seq_lens must have {common.num_reqs} entries, got {len(encoder)}"
        )


def _check_starts(common: Batch, starts: np.ndarray) -> None:
    name = "query_start_loc"
    _refuse(starts[:1] != 0, name, starts[:1], "start at 0")
    falls = np.concatenate([[False], np.diff(starts) < 0])
    _refuse(falls, name, starts, "never fall")
    rows = common.slot_mapping.shape[0]
    if not starts[-1] <= common.num_actual_tokens <= rows:
        raise ValueError(
            f"num_actual_tokens must be between the {starts[-1]} query tokens and the {rows} rows "
            f"of slot_mapping, got {common.num_actual_tokens}"
        )


def _check_lengths(common: Batch, query_lens: np.ndarray, seq_lens: np.ndarray) -> None:
    impossible = (seq_lens < query_lens) & (seq_lens != 0)  # 0: padding, its slots are checked
    if impossible.any():
        at = int(np.argmax(impossible))
        raise ValueError(
            f"seq_lens must be at least the query lengths, got seq_lens[{at}]={seq_lens[at]} "
            f"with {query_lens[at]} query tokens"
        )
    for name, lengths in (("max_query_len", query_lens), ("max_seq_len", seq_lens)):
        longest = int(lengths.max(initial=0))
        if getattr(common, name) < longest:
            raise ValueError(f"{name} must be at least {longest}, got {getattr(common, name)}")
    if common.num_computed_tokens_cpu is not None:
        computed = common.num_computed_tokens_cpu.numpy()
        _refuse(
            computed != np.maximum(seq_lens - query_lens, 0),
            "num_computed_tokens_cpu",
            computed,
            "be seq_lens minus the query lengths",
        )
    if common.seq_lens_cpu_upper_bound is not None:
        bound = common.seq_lens_cpu_upper_bound.numpy()
        _refuse(bound < seq_lens, "seq_lens_cpu_upper_bound", bound, "be at least seq_lens")


def check_blocks(
    common: Batch,
    seq_lens: np.ndarray,
    num_blocks: int | None,
    block_size: int | None,
) -> None:
    """Blocks in use must exist; without a block size all entries of the table count as used."""
    table_SM = common.block_table_tensor.cpu().numpy()
    used_SM = np.ones(table_SM.shape, dtype=bool)
    if block_size is not None:
        capacity = table_SM.shape[1] * block_size
        _refuse(seq_lens > capacity, "seq_lens", seq_lens, f"fit the table's {capacity} tokens")
        used_SM = np.arange(table_SM.shape[1]) * block_size < seq_lens[:, None]
    limit = np.iinfo(np.int32).max if num_blocks is None else num_blocks
    outside_SM = used_SM & ((table_SM < 0) | (table_SM >= limit))
    _refuse(outside_SM, "block_table_tensor", table_SM, f"hold block ids from 0 to {limit - 1}")


def _check_slots(common: Batch, num_blocks: int | None, block_size: int | None) -> None:
    slots_T = common.slot_mapping.cpu().numpy()
    limit = np.iinfo(np.int64).max
    if num_blocks is not None and block_size is not None:
        limit = num_blocks * block_size
    outside_T = (slots_T < -1) | (slots_T >= limit)
    _refuse(outside_T, "slot_mapping", slots_T, f"hold -1 or slots from 0 to {limit - 1}")
    if common.window_slot_mapping is not None:
        own_T = common.window_slot_mapping.cpu().numpy()
        _refuse(own_T < -1, "window_slot_mapping", own_T, "hold -1 or slots")


def _check_padding(common: Batch, start: np.ndarray, seq_lens: np.ndarray) -> None:
    """A request with rows and without tokens is padding: nothing of it may be written."""
    request_T = np.repeat(np.arange(seq_lens.size), np.diff(start))
    slots_T = common.slot_mapping[: request_T.size].cpu().numpy()
    written_T = (seq_lens[request_T] == 0) & (slots_T != -1)
    _refuse(written_T, "slot_mapping", slots_T, "be -1 for requests whose seq_lens are 0")


def _check_logits(common: Batch, readable: bool) -> None:
    padded, count = common.logits_indices_padded, common.num_logits_indices
    wanted = padded[:count] if padded is not None and count is not None else None
    for name, mirror, tensor in (
        ("logits_indices_cpu", common.logits_indices_cpu, None),
        ("logits_indices_padded", None, wanted),
        ("logits_indices", None, common.logits_indices),
    ):
        rows = _host(mirror, tensor, readable)
        if rows is not None:
            outside = (rows < 0) | (rows >= common.num_actual_tokens)
            _refuse(outside, name, rows, f"be rows from 0 to {common.num_actual_tokens - 1}")


# -- of any arguments ------------------------------------------------------------------------------


def check_int(name: str, value: object, least: int | None = None) -> None:
    """Raise unless `value` is an integer, not a tensor and not below `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Raise a ValueError that names the argument unless dtype, shape (None: any), device fit.

    Kernels walk these tensors with a stride of one in the last dimension.
    """
    got = tensor.shape
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        )
    if len(got) != len(shape) or [n for n, m in zip(got, shape) if m is not None and n != m]:  # noqa: B905
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(got)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if got[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have contiguous entries, got a stride of {tensor.stride(-1)}"
        )


def is_device(got: torch.device, wanted: torch.device) -> bool:
    """Whether `got` is `wanted`, where a device without an index means any of its type."""
    if got.type != wanted.type:
        return False
    return wanted.index is None or got.index is None or got.index == wanted.index


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory: the ranges from first to last entry touch."""
    (a_begin, a_end), (b_begin, b_end) = _extent(a), _extent(b)
    return a_begin < b_end and b_begin < a_end


def check_apart(**tensors: torch.Tensor | None) -> None:
    """Raise if two of the tensors, all of which are written, share memory."""
    extents = sorted((*_extent(t), name) for name, t in tensors.items() if t is not None)
    for (_, end, name), (begin, _, other) in itertools.pairwise(extents):
        if begin < end:
            raise ValueError(f"{name} and {other} must not share memory, got overlapping tensors")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
