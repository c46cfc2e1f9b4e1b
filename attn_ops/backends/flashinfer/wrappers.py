"""FlashInfer's wrappers of one builder, and the workspace that they share.

A wrapper holds one plan at a time: host arrays in pinned memory, copied to the device without
waiting. So a wrapper belongs to the metadata it was planned for until that metadata is gone, and is
planned anew only when its last copy is done: two batches may be built before either runs, and the
host may run ahead of the device. All of a builder's batches run on one stream: on two, one batch's
partial results would overwrite the other's.

N query heads, K kv heads, H head size.
"""

import enum
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.metadata import AttentionSpec

WORKSPACE_BYTES = 128 << 20
"""Float workspace of a builder, as FlashInfer recommends; more where a geometry needs more."""


class Kind(enum.Enum):
    """What a wrapper is constructed for."""

    DECODE = "single-token queries on CUDA cores"
    DECODE_TENSOR_CORES = "single-token queries, the heads of a group as one tile"
    PREFILL = "queries of any length"

    @classmethod
    def of_decodes(cls, spec: AttentionSpec) -> "Kind":
        """Tensor cores from 4 heads a group on.

        FlashInfer's documentation calls them faster for large groups; where they begin to pay is
        not measured here. The CUDA cores have no kernels for most groups above 4.
        """
        group = spec.num_heads // spec.num_kv_heads
        return cls.DECODE_TENSOR_CORES if group >= 4 else cls.DECODE


class Wrapper:
    """One of FlashInfer's wrappers, and whether its plan has left the pinned memory."""

    def __init__(self, kind: Kind, workspace: torch.Tensor) -> None:
        import flashinfer

        if kind is Kind.PREFILL:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        else:
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=kind is Kind.DECODE_TENSOR_CORES
            )
        self._copied = torch.cuda.Event()

    def plan(self, **arguments: Any) -> None:
        self._wrapper.plan(**arguments)
        self._copied.record()

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrapper.run(*arguments, **keywords)

    def copied(self) -> bool:
        """Whether the device has the last plan; asks without waiting."""
        return self._copied.query()

    def __del__(self) -> None:
        # Pinned memory that torch's allocator hands on while FlashInfer's copy reads it would
        # spoil the plan: the allocator knows nothing of that copy.
        if not sys.is_finalizing():
            self._copied.synchronize()


class Wrappers:
    """Wrappers that no metadata uses, by kind; a wrapper takes 8 MiB on each side."""

    def __init__(self, specs: Sequence[AttentionSpec], workspace_bytes: int) -> None:
        self._specs = specs
        self._workspace_bytes = workspace_bytes
        self._workspace: torch.Tensor | None = None
        self._idle: dict[Kind, list[Wrapper]] = {kind: [] for kind in Kind}

    def take(self, kind: Kind, device: torch.device) -> Wrapper:
        """A wrapper to plan; a new one unless an idle one's copy is done."""
        idle = self._idle[kind]
        for i, wrapper in enumerate(idle):
            if wrapper.copied():
                return idle.pop(i)
        return Wrapper(kind, self._workspace_on(device))

    def lend(self, taken: dict[Kind, Wrapper], user: object) -> None:
        """Keep the wrappers from others for as long as `user` lives."""
        for kind, wrapper in taken.items():
            back = weakref.finalize(user, self._idle[kind].append, wrapper)
            back.atexit = False

    def _workspace_on(self, device: torch.device) -> torch.Tensor:
        """Partial results between the kernels of one call, so that wrappers can share it."""
        if self._workspace is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            size = max([self._workspace_bytes, *(split_bytes(s, num_sms) for s in self._specs)])
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._workspace


def split_bytes(spec: AttentionSpec, num_sms: int) -> int:
    """Most bytes that the FA2 kernels need for keys split over programs.

    Float32 partial outputs and log-sum-exps of 2 tiles a multiprocessor, which have 128 rows of a
    group's heads, or 64 at head size 256 (`PrefillPlan` in FlashInfer's scheduler.cuh).
    """
    tile_rows = 128 if spec.head_size < 256 else 64
    group = spec.num_heads // spec.num_kv_heads
    return 2 * num_sms * group * tile_rows * (spec.head_size + 1) * 4
