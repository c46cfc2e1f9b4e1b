"""Operators that write get a tensor they read as a copy, where it shares memory with the written.

Inductor of torch 2.11 to 2.14 hands an operator the tensor that it writes where the caller passed a
clone of it (pytorch#198031). It can go when 2.15 is the oldest: then the tests of
tests/attn_ops/ops/test_compiled.py that name the issue pass with `unshared` returning `x`.
"""

from collections.abc import Callable, Sequence

import torch

from attn_ops.metadata.validation import overlap


def unshared(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it where it is of the same storage as `written`."""
    same = x.untyped_storage().data_ptr() == written.untyped_storage().data_ptr()
    return x.clone() if same else x


def apart_from(written: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that returns its tensor, or a copy of it where it overlaps one of `written`."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in written}

    def apart(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in storages:  # spares the costlier comparison
            return x
        return x.clone() if any(overlap(x, tensor) for tensor in written) else x

    return apart
