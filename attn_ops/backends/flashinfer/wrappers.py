"""FlashInfer's wrappers of one builder, and the workspace that they share.

A wrapper holds one plan at a time: host arrays in pinned memory, copied to the device without
waiting. So a wrapper belongs to the metadata it was planned for until that metadata is gone, and is
planned anew only when its last copy is done: two batches may be built before either runs, and the
host may run ahead of the device. All of a builder's batches run on one stream: on two, one batch's
partial results would overwrite the other's.

N query heads, K kv heads, H head size, S requests.
"""

import enum
import importlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_ops.backends.flashinfer.parts import Part
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionSpec

WORKSPACE_BYTES = 128 << 20
"""Float workspace of a builder, as FlashInfer recommends; more where a geometry needs more."""

GRAPH_INT_BYTES = 1 << 20
"""Plan of a captured batch: 13 bytes a tile, 8 a request, so room for 30,000 requests. FlashInfer
checks it before it writes. Its own 8 MiB would count for every captured size and geometry."""


class Kind(enum.Enum):
    """What a wrapper is constructed for.

    The heads of a group are one tile on tensor cores in all of them. FlashInfer's kernels on CUDA
    cores are not used: at 4 heads a group they read 2.82 TB/s where these read 4.37 (one H200,
    flashinfer 0.6.8.post1, batch 64, 8192 tokens), they have no kernels for most larger groups,
    and below 4 heads nobody has measured them here.
    """

    DECODE = "single-token queries, FA2 kernels"
    PREFILL = "queries of any length, FA3 kernels on sm_90, FA2 elsewhere"
    PREFILL_FA2 = (
        "queries of any length over FP8 keys, which FA3 kernels take with FP8 queries only"
    )

    MLA = "queries over latents: FA3 kernels on sm_90, FA2 elsewhere"

    @classmethod
    def of_prefills(cls, spec: AttentionSpec) -> "Kind":
        return cls.PREFILL if spec.kv_cache_dtype == "auto" else cls.PREFILL_FA2


def plan_arguments(
    kind: Kind,
    spec: AttentionSpec,
    part: Part,
    indices: torch.Tensor,
    block_size: int,
    causal: bool = True,
) -> dict[str, Any]:
    """Keywords of a wrapper's `plan`; the two wrappers have different names for the same things.

    `causal` is the batch's. A single-token query sees all keys either way.
    """
    shared = {
        "num_qo_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "page_size": block_size,
        "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
        "logits_soft_cap": spec.soft_cap,
        "q_data_type": spec.dtype,
        "kv_data_type": KV_CACHE_DTYPES[spec.kv_cache_dtype] or spec.dtype,
        # A spec has no scale: layers of one geometry may differ in it. `run` multiplies this one
        # by its q_scale, so 1 leaves the scale to `forward`.
        "sm_scale": 1.0,
        "seq_lens": part.seq_lens,
    }
    if kind is Kind.DECODE:
        return shared | {
            "indptr": part.page_start_loc,
            "indices": indices,
            "last_page_len": part.last_page_len,
            "head_dim": spec.head_size,
        }
    return shared | {
        "qo_indptr": part.query_start_loc,
        "paged_kv_indptr": part.page_start_loc,
        "paged_kv_indices": indices,
        "paged_kv_last_page_len": part.last_page_len,
        "head_dim_qk": spec.head_size,
        "causal": causal,
        "max_token_per_sequence": int(part.query_start_loc.diff().max()),
    }


class Wrapper:
    """One of FlashInfer's wrappers, and whether its plan has left the pinned memory."""

    def __init__(self, kind: Kind, workspace: torch.Tensor, **graph: Any) -> None:
        import flashinfer

        self.kind = kind
        if kind is Kind.MLA:
            hopper = torch.cuda.get_device_capability(workspace.device)[0] == 9
            mla: Any = importlib.import_module("flashinfer.mla")
            self._wrapper = mla.BatchMLAPagedAttentionWrapper(
                workspace, backend="fa3" if hopper else "fa2"
            )
        elif kind is Kind.DECODE:
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2", **graph
            )
        else:
            backend = "fa2" if kind is Kind.PREFILL_FA2 else "auto"
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=backend
            )
        self._copied = torch.cuda.Event()

    def plan(self, **arguments: Any) -> None:
        """Plan anew; waits for the last plan's copy, which reads the memory that is written."""
        if not self._copied.query():
            self._copied.synchronize()
        self._wrapper.plan(**arguments)
        self._copied.record()

    @property
    def inner(self) -> Any:
        """FlashInfer's own."""
        return self._wrapper

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrapper.run(*arguments, **keywords)

    def copied(self) -> bool:
        """Whether the device has the last plan; asks without waiting."""
        return self._copied.query()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Pinned memory that torch's allocator hands on while FlashInfer's copy reads it would
        # spoil the plan: the allocator knows nothing of that copy.
        # A default, because this module's own names may be gone when the interpreter ends.
        if not is_finalizing() and hasattr(self, "_copied"):
            self._copied.synchronize()


class GraphWrapper(Wrapper):
    """A decode wrapper whose launches are recorded: every plan must ask for the same ones.

    A wait for the last plan's copy is a wait for the replay before the last one: the copy follows
    that replay on the stream. So the device always has one replay queued.
    """

    def __init__(self, workspace: torch.Tensor, **buffers: torch.Tensor) -> None:
        super().__init__(Kind.DECODE, workspace, use_cuda_graph=True, **buffers)
        ints = torch.empty(GRAPH_INT_BYTES, dtype=torch.uint8, device=workspace.device)
        self._wrapper.reset_workspace_buffer(workspace, ints)
        self._launches: list[int] | None = None

    def plan(self, **arguments: Any) -> None:
        super().plan(**arguments)
        launches = list(self._wrapper._plan_info)  # grid, tile and offsets into the workspaces
        if self._launches is None:
            self._launches = launches
        assert launches == self._launches, (
            f"a plan must fit the recorded launches {self._launches}, got {launches}"
        )


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

    def captured(
        self, spec: AttentionSpec, num_reqs: int, device: torch.device, **buffers: torch.Tensor
    ) -> GraphWrapper:
        """A wrapper for captured batches of S requests that reads the page arrays in `buffers`."""
        return GraphWrapper(self._workspace_on(device, spec, num_reqs), **buffers)

    def _workspace_on(
        self, device: torch.device, spec: AttentionSpec | None = None, num_reqs: int = 0
    ) -> torch.Tensor:
        """Partial results between the kernels of one call, so that wrappers can share it.

        Wrappers keep the one they were made with where a captured batch needs a larger one.
        """
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        size = max([self._workspace_bytes, *(split_bytes(s, num_sms) for s in self._specs)])
        if spec is not None:
            size = max(size, graph_bytes(spec, num_sms, num_reqs))
        if self._workspace is None or self._workspace.numel() < size:
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


def graph_bytes(spec: AttentionSpec, num_sms: int, num_reqs: int) -> int:
    """Bytes that a captured decode batch needs: there the keys are always split.

    At most 2 tiles a multiprocessor over the kv heads, or one a request and a rounded tile of
    queries where those are more (the same source, with graphs enabled); 16 bytes of alignment.
    """
    group = spec.num_heads // spec.num_kv_heads
    tile_rows = 16 if group <= 16 else 64 if group <= 64 or spec.head_size >= 256 else 128
    tiles = max(2 * num_sms // spec.num_kv_heads, -(-num_reqs * group // tile_rows) + num_reqs - 1)
    return spec.num_heads * tiles * tile_rows * (spec.head_size + 1) * 4 + 16
