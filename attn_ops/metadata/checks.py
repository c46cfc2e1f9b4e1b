"""Checks of arguments, each a ValueError that names the argument, its value and what it must be."""

import itertools

import numpy as np
import torch


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
