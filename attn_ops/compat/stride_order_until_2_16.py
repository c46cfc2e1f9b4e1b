"""Inductor made to order strides without a guard, so that one graph serves any number of rows.

Torch 2.15 needs it: to order the strides of an output it asks whether there is more than one row,
and leaves a guard. A model is then compiled again for one row of logits, and again for none. The
order only chooses a layout; with one row or none the orders are of the same layout. It can go when
`test_chunks_by_inductor` of tests/scenarios/test_fast_prefill.py counts one graph without it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from attn_ops.compat.inductor_lock import INDUCTOR_LOCK
from attn_ops.compat.torch_version import TORCH_VERSION


@contextlib.contextmanager
def strides_ordered_without_guards() -> Iterator[None]:
    """Symbolic strides are compared by their hints."""
    if TORCH_VERSION < (2, 14):
        yield
        return
    from torch._inductor import ir

    with INDUCTOR_LOCK, patch.object(ir, "argsort_sym", _without_guards(ir.argsort_sym)):
        yield


def _without_guards(argsort_sym: Any) -> Any:
    def order(shape_env: Any, seq: Sequence[Any], *, reverse: bool = False) -> list[int]:
        with shape_env.suppress_guards():
            return argsort_sym(shape_env, seq, reverse=reverse)

    return order
