"""Mends Triton's interpreter for the tests. It may go with the Triton version after 3.9.

Triton 3.9.0 turns a scalar comparison that is spread over a block into integers, and then refuses
it as a mask: `(offsets < n) & (n < m)`. Compiled kernels are right.
"""

from typing import Any

import numpy as np


def keep_scalar_masks() -> None:
    """Let a scalar bool stay one when it is spread over a block."""
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        handle = spread(self, ret_ty, arg)
        if arg.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    InterpreterBuilder.create_splat = create_splat
