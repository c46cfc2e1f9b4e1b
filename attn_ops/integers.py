"""Sizes of tiles and grids, on the host.

Triton's functions of these names look for constants of kernels in their arguments, which takes
1.4 us a call (a CPU, Triton 3.6, 2026-11-29), and a layer of a decode step made 20.
"""

from typing import Any


def cdiv(a: int, b: int) -> Any:
    """ceil(a / b), as an int; kernels declare what it becomes as `tl.constexpr`."""
    return -(-a // b)


def next_power_of_2(n: int) -> Any:
    """The least power of 2 that is at least n, as an int; 1 of 0."""
    return 1 << max(n - 1, 0).bit_length()
