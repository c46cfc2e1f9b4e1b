"""Which steps become CUDA graphs, and under which key a graph is stored."""

import dataclasses
from enum import Enum


class CUDAGraphMode(Enum):
    """What of a session is captured."""

    NONE = "none"
    """Nothing."""
    FULL_DECODE_ONLY = "full_decode_only"
    """Steps in which every request adds one token, each whole: model, lm_head and sampling. The default."""

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
        raise ValueError(f"cudagraph_mode must be known, got {mode!r}; supported: {', '.join(m.name for m in cls)}")


@dataclasses.dataclass(frozen=True, order=True)
class BatchDescriptor:
    """Key of a captured graph: every host value that reaches a kernel launch stands in it."""

    num_reqs: int  # requests, padding included; each adds one token
    sampling: bool  # whether random numbers are drawn (some temperature is above 0)


def default_capture_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, multiples of 8 to 256, then of 16, and `max_batch_size` itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_batch_size + 1, 16)]
    return sorted({size for size in sizes if size < max_batch_size} | {max_batch_size})
