"""Mends Triton's interpreter for the tests. Compiled kernels are right in both cases."""

from typing import Any

import numpy as np


def mend_interpreter() -> None:
    _keep_scalar_masks()
    _take_scalars_as_indices()


def _keep_scalar_masks() -> None:
    """Let a scalar bool stay one when it is spread over a block.

    Triton 3.9.0 turns a scalar comparison that is spread over a block into integers, and then
    refuses it as a mask: `(offsets < n) & (n < m)`. It may go with the Triton version after 3.9.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        handle = spread(self, ret_ty, arg)
        if arg.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    InterpreterBuilder.create_splat = create_splat


def _take_scalars_as_indices() -> None:
    """Let a scalar bound a loop: `range(0, n)`.

    Triton 3.6 (torch 2.11) makes an integer of an array with one element, which NumPy 2.4 refuses.
    It may go when pyproject.toml asks for Triton 3.7.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_lang_tensor
