"""Arithmetic of launches. Triton's functions of these names take 1.4 us of the host a call.

They look for constants of kernels in their arguments, and a layer calls dozens.
"""

from typing import Any


def cdiv(a: int, b: int) -> Any:
    """ceil(a / b), as an int; kernels declare what it becomes as `tl.constexpr`."""
    return -(-a // b)


def next_power_of_2(n: int) -> Any:
    """The least power of 2 that is at least n, as an int; 1 of 0."""
    return 1 << max(n - 1, 0).bit_length()
