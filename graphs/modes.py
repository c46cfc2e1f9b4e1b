"""Which steps become CUDA graphs, and under which key a graph is stored."""

import dataclasses
from collections.abc import Sequence
from enum import Enum


class CUDAGraphMode(Enum):
    """What of a session is captured."""

    NONE = "none"
    """Nothing."""
    FULL_DECODE_ONLY = "full_decode_only"
    """Steps in which every request adds one token, whole, model to sampling. The default."""

    @classmethod
    def parse(cls, mode: "CUDAGraphMode | str") -> "CUDAGraphMode":
        """A mode from its name in either case.

        Raises:
            ValueError: there is none of that name.
        """
        if isinstance(mode, cls):
            return mode
        for known in cls:
            if str(mode).lower() in (known.value, known.name.lower()):
                return known
        names = ", ".join(known.name for known in cls)
        raise ValueError(f"cudagraph_mode must be known, got {mode!r}; supported: {names}")


@dataclasses.dataclass(frozen=True, order=True)
class BatchDescriptor:
    """Key of a captured graph: every host value that reaches a kernel launch stands in it."""

    num_reqs: int  # requests, padding included; each adds one token
    sampling: bool  # whether random numbers are drawn (some temperature is above 0)


def default_capture_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, multiples of 8 to 256, then of 16, and `max_batch_size` itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_batch_size + 1, 16)]
    return sorted({size for size in sizes if size < max_batch_size} | {max_batch_size})


def checked_capture_sizes(sizes: Sequence[int] | None, max_batch_size: int) -> list[int]:
    """The wanted sizes in order, or the default ones.

    Raises:
        ValueError: a size is out of range.
    """
    if sizes is None:
        return default_capture_sizes(max_batch_size)
    bad = next((s for s in sizes if not 1 <= s <= max_batch_size), None)
    if bad is not None:
        raise ValueError(
            f"capture_sizes must be from 1 to max_batch_size={max_batch_size}, got {bad}"
        )
    return sorted(set(sizes))
