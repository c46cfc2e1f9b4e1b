"""Torch made to trace a batch without asking whether it has more than one token.

Torch 2.11 to 2.15 leave such guards, each of which compiles a model again for its first decode
step of one request. It can go when tests/scenarios/test_families.py (llama4) and
test_sharing_families.py count no recompilation without it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_impls import _compute_stride


@contextlib.contextmanager
def traced_for_any_size() -> Iterator[None]:
    """Replace what asks, in all threads: the caller sees to it that one at a time is inside.

    - The meta of copy_, which torch.polar is traced through (Llama 4), asks whether its target
      overlaps itself. 2 is torch's answer if it cannot say.
    - Strides of a view are looked for by a comparison of sizes (`_strides_of_any_size`).
    """
    overlap = mock.patch.object(torch, "_debug_has_internal_overlap", return_value=2)
    strides = mock.patch.object(fake_impls, "_compute_stride", _strides_of_any_size)
    with overlap, strides:
        yield


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
