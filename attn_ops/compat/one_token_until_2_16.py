"""Torch made to trace a batch without asking whether it has more than one token.

Torch 2.11 to 2.15 leave such guards, each of which compiles a model again for its first decode
step of one request. It can go when tests/scenarios/test_families.py (llama4) and
test_sharing_families.py count no recompilation without it.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations as metas
from torch._subclasses import fake_impls
from torch._subclasses.fake_impls import _compute_stride


@contextlib.contextmanager
def traced_for_any_size() -> Iterator[None]:
    """Replace what asks, in all threads: the caller sees to it that one at a time is inside.

    - The meta of copy_, which torch.polar is traced through (Llama 4), asks whether its target
      overlaps itself. 2 is torch's answer if it cannot say.
    - Strides of a view are looked for by a comparison of sizes (`_strides_of_any_size`).
    - The meta of _scaled_mm asks whether there is one scale of the rows (`_checked_for_any_size`).
    - A reshape asks whether it is a view, of a slice of each row too (`_reshaped_for_any_size`).
    - The meta of copy asks whether its target is dense (`_copied_for_any_size`).
    - Inductor asks whether a view drops the rows, and goes another way if not (`_equal_by_hints`),
      and in torch 2.11 which views of a tensor overlap (`_overlap_if_unknown`).
    """
    overlap = mock.patch.object(torch, "_debug_has_internal_overlap", return_value=2)
    strides = mock.patch.object(fake_impls, "_compute_stride", _strides_of_any_size)
    scaled = mock.patch.object(metas, "_check_scaled_mm_sizes", _checked_for_any_size)
    reshape = mock.patch.object(torch.Tensor, "reshape", _reshaped_for_any_size)
    copy = {torch.ops.aten.copy.default: _copied_for_any_size}
    copies = mock.patch.dict(fake_impls.op_implementations_dict, copy)
    with overlap, strides, scaled, reshape, copies, _equal_by_hints(), _overlap_if_unknown():
        yield


_check_scaled_mm_sizes: Any = metas._check_scaled_mm_sizes
_SOME_ROWS = 16
"""A row count that every product in FP8 takes."""


def _checked_for_any_size(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    """The output [T, M] of x [T, K] and weight [K, M], checked for any T as for some other.

    With a scale a row torch asks T == 1 first, as one scale is also that of a tensor.
    """
    rows, scales = x.shape[0], scale_x.shape
    by_row = scale_x.dtype == torch.float32 and len(scales) == 2 and type(scales[1]) is int
    if not (by_row and scales[1] == 1 and isinstance(scales[0], torch.SymInt)):
        return _check_scaled_mm_sizes(x, weight, scale_x, *rest, **options)
    some_x = x.new_empty_strided((_SOME_ROWS, x.shape[1]), x.stride())
    some_scale = scale_x.new_empty((_SOME_ROWS, 1))
    out = _check_scaled_mm_sizes(some_x, weight, some_scale, *rest, **options)
    return out.new_empty((rows, out.shape[1]))


def _strides_of_any_size(
    old_shape: Any, old_stride: Any, new_shape: Any, size_oblivious: bool = False
) -> Any:
    """Strides of a view that hold for one token and for many, where there are such.

    Inductor reshapes slices of strided tensors, as the per-layer inputs of Gemma 3n and Gemma 4, by
    torch's strides, and torch guards on T > 1 on the way to them.
    """
    strides = _compute_stride(old_shape, old_stride, new_shape, size_oblivious=True)
    if strides is not None or size_oblivious:
        return strides
    return _compute_stride(old_shape, old_stride, new_shape)


_reshape: Any = torch.Tensor.reshape


def _reshaped_for_any_size(x: torch.Tensor, *sizes: Any, **named: Any) -> torch.Tensor:
    """A view where there is one for any number of rows, else a copy.

    Qwen3-Next reshapes q and v, which are slices of each row.
    """
    shape = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes)
    if named or all(type(n) is int for n in x.shape):
        return _reshape(x, *sizes, **named)
    if -1 in [n for n in shape if type(n) is int]:
        place = shape.index(-1)
        shape[place] = x.numel() // math.prod(shape[:place] + shape[place + 1 :])
    if _compute_stride(x.shape, x.stride(), shape, size_oblivious=True) is None:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(shape)


def _copied_for_any_size(
    mode: Any, copy: Any, x: torch.Tensor, source: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    """What a copy into x returns: it has its strides.

    Qwen3.5 writes every third column of its RoPE.
    """
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@contextlib.contextmanager
def _equal_by_hints() -> Iterator[None]:
    """Sizes that differ in the traced batch are not equal, and no guard says so.

    A view of [T * heads, size] as [T, heads * size] asks whether size is T * heads * size.
    """
    from torch._inductor.sizevars import SizeVarAllocator  # it is slow to import

    check: Any = SizeVarAllocator.check_equals

    def check_equals(sizes: Any, left: Any, right: Any) -> None:
        hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
        if hint(left, fallback=0) != hint(right, fallback=0):
            raise AssertionError(f"sizes must be equal, got {left} and {right}")
        check(sizes, left, right)

    with mock.patch.object(SizeVarAllocator, "check_equals", check_equals):
        yield


@contextlib.contextmanager
def _overlap_if_unknown() -> Iterator[None]:
    """Tensors whose sizes are not known overlap, as far as writes in place are concerned.

    Qwen3.5 writes every third column of its RoPE.
    """
    from torch._inductor.fx_passes import reinplace

    compute: Any = reinplace.compute_overlapping_tensors

    def overlapping(tensors: list[torch.Tensor], *rest: Any, **named: Any) -> set[int]:
        known = all(type(n) is int for x in tensors for n in (*x.shape, *x.stride()))
        return compute(tensors, *rest, **named) if known else set(range(len(tensors)))

    with mock.patch.object(reinplace, "compute_overlapping_tensors", overlapping):
        yield
