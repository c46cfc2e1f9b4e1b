"""What a session captures: asked, possible and why, decided once before anything is captured."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionSpec,
    Backend,
    select_backend,
)
from attn_ops.backends.grouped import GroupedBackend, levels, runs_on
from attn_ops.backends.mla.workspace import MLAWorkspace
from attn_ops.backends.registry import Selection
from graphs.capture.dispatch import CudagraphDispatcher
from graphs.capture.levels import ModeResolution, resolve
from graphs.capture.memory import estimate
from graphs.capture.pieces import Breaks, PiecewiseRecorder
from graphs.capture.pool import GraphPool
from graphs.capture.recorder import Builder, Recorder
from graphs.capture.rerun import RerunRecorder
from graphs.capture.segments import CUDASegments
from graphs.capture.whole import WholeRecorder
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.options import SessionOptions


@dataclasses.dataclass
class CapturePlan:
    """Modes, sizes and keys of a session."""

    resolution: ModeResolution  # of each kind of batch and layer group
    dispatcher: CudagraphDispatcher
    options: SessionOptions
    sizes: dict[str, int] | None  # of the model, for `memory.estimate`; None: not known

    @property
    def asked(self) -> CUDAGraphMode:
        """The mode that was asked for."""
        return self.resolution.asked

    @property
    def used(self) -> CUDAGraphMode:
        """The mode in use."""
        return self.resolution.used

    @property
    def why(self) -> str:
        """What keeps `used` from being `asked`, and what would change it."""
        return self.resolution.why

    @property
    def debug(self) -> str | None:
        return self.options.debug

    @property
    def estimated_bytes(self) -> int | None:
        """Of the graphs of all keys, from shapes; None where there are none or a size is not known.

        In debugging there are none.
        """
        keys = [key for _, key in self.first_keys()]
        if self.debug is not None or self.sizes is None or not keys:
            return None
        rows = max(key.num_tokens if key.uniform else key.num_reqs for key in keys)
        return estimate([key.num_tokens for key in keys], **self.sizes, logits_rows=rows)

    @property
    def decode_sizes(self) -> list[int]:
        return self.dispatcher.decode_sizes

    @property
    def chooses_mixed(self) -> bool:
        """Whether steps with prompts are replayed only where that is faster than calling them.

        Sizes that the caller has asked for are always replayed.
        """
        return self.debug is None and self.options.mixed_capture_sizes is None

    @property
    def num_draft_tokens(self) -> int:
        return self.options.num_draft_tokens

    @property
    def lazy(self) -> bool:
        return self.options.lazy_capture

    @classmethod
    def of(
        cls,
        options: SessionOptions,
        backend: Backend,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        sizes: dict[str, int] | None,
    ) -> "CapturePlan":
        """Decide. `sizes`: see `memory.sizes_of`.

        Raises:
            ValueError: `strict`, and the mode cannot be had.
        """
        mode, debug, query_lens = options.mode, options.debug, options.query_lens
        declared = groups = levels(backend, specs)
        needs_host = getattr(backend.builder, "needs_mirrors", False)
        plain = not isinstance(backend, GroupedBackend) and not needs_host
        if debug is not None and device.type != "cuda" and plain:
            # Nothing is captured here, so a plain backend runs as if all could be. A grouped one
            # always refuses batches that its groups are too weak for, and one that needs the
            # lengths on the host has none in a whole graph.
            groups = dict.fromkeys(declared, AttentionCGSupport.ALWAYS)
        found = resolve(
            mode, groups, device.type, query_lens, options.strict, debug, options.any_mode
        )
        found = dataclasses.replace(found, groups=declared)
        if debug is not None:
            why = f"debug={debug!r}: nothing is captured, steps take the same path"
            why += f"; {mode.name} asked for, but {found.why}" if found.lowered else ""
            found = found.in_debugging(why)
        dispatcher = CudagraphDispatcher(
            mode, options.decode_sizes, options.mixed_sizes, options.max_batch_size, query_lens
        )
        dispatcher.initialize_keys(found.decode_modes, found.mixed_mode)
        return cls(found, dispatcher, options, sizes)

    def recorders(self, builder: Builder) -> dict[CUDAGraphMode, Recorder]:
        """What makes the graphs, by mode; empty where nothing is to be captured.

        `builder` is that of the backend.
        """
        if self.used is CUDAGraphMode.NONE:
            return {}
        if self.debug is not None:
            return {
                CUDAGraphMode.FULL: RerunRecorder(builder, in_pieces=False),
                CUDAGraphMode.PIECEWISE: RerunRecorder(builder, in_pieces=True),
            }
        pool = GraphPool()
        return {
            CUDAGraphMode.FULL: WholeRecorder(builder, pool),
            CUDAGraphMode.PIECEWISE: PiecewiseRecorder(builder, CUDASegments(pool), self.breaks),
        }

    def breaks(self, key: BatchDescriptor) -> Breaks | None:
        """Which calls of attention run between the graphs of a key; None: all."""
        broken = self.resolution.broken_for(key)
        if broken == frozenset(self.resolution.groups):
            return None
        return lambda call: runs_on(call.meta, call.spec).name in broken

    def stop(self, why: str) -> None:
        """Nothing is captured from here on, and nothing has a key."""
        stopped = self.resolution.stopped(why)
        self.dispatcher.initialize_keys(stopped.decode_modes, stopped.mixed_mode)
        self.resolution = stopped  # last: while there are keys, it says where their graphs break

    def add_chunks(self, num_tokens: int) -> None:
        """Make a step of so many tokens, of prompts that do not end in it, one of the keys."""
        self.dispatcher.dispatch(num_tokens, 1, logits=False)

    def first_keys(self) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """What is captured before the first step: greedy steps of all sizes, largest first."""
        modes = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        keys = [(mode, key) for mode in modes for key in self.dispatcher.keys(mode)]
        return sorted(keys, key=lambda pair: -pair[1].num_tokens)


def selected(
    specs: Sequence[AttentionSpec],
    block_size: int,
    device: torch.device,
    backend: str | Backend | None,
) -> Selection:
    """The backend of a session: chosen, by name, or the one that is given.

    Raises:
        ValueError: it does not take the layers.
    """
    if not isinstance(backend, Backend):
        return select_backend(specs, block_size=block_size, device=device, backend=backend)
    reasons = [r for spec in specs for r in backend.reasons_against(spec, block_size, device)]
    if reasons:
        raise ValueError(f"backend {backend.name} cannot be used: {'; '.join(reasons)}")
    return Selection(backend, "requested", {})


def builder_of(
    backend: Backend,
    specs: Sequence[AttentionSpec],
    options: SessionOptions,
    device: torch.device,
) -> AttentionMetadataBuilder:
    """The builder of a session's metadata; of latent attention with a workspace for its steps."""
    keywords: dict[str, Any] = {}
    if "workspace" in inspect.signature(backend.builder).parameters:
        keywords["workspace"] = MLAWorkspace.for_model(
            specs,
            max_model_len=options.max_tokens,
            max_num_seqs=options.max_batch_size,
            block_size=options.block_size,
            device=device,
        )
    return backend.builder(backend, specs, options.block_size, device, **keywords)
