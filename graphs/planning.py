"""What a session captures: asked, possible and why, decided once before anything is captured."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops import AttentionSpec, Backend, select_backend
from attn_ops.backends.grouped import levels, runs_on
from attn_ops.backends.registry import Selection
from attn_ops.ops.breaks import AttentionCall
from graphs.dispatch import CudagraphDispatcher
from graphs.levels import ModeResolution, resolve
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.pieces import CUDASegments, PiecewiseRecorder
from graphs.recorders import CUDARecorder, RerunRecorder, Run
from graphs.runner import StepRunner

DEBUGS = (None, "eager_replay")
ON_FAILURE = ("raise", "continue")


@dataclasses.dataclass
class CapturePlan:
    """Modes, sizes and keys of a session.

    Attributes:
        asked, used: the mode.
        why: what keeps `used` from being `asked`, and what would change it.
    """

    asked: CUDAGraphMode
    used: CUDAGraphMode
    why: str
    resolution: ModeResolution  # of each kind of batch and layer group
    decode_sizes: list[int]
    mixed_sizes: list[int]
    num_draft_tokens: int
    dispatcher: CudagraphDispatcher
    debug: str | None
    lazy: bool
    keep_failures: bool

    @classmethod
    def of(
        cls,
        mode: CUDAGraphMode,
        backend: Backend,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        *,
        decode_sizes: list[int],
        mixed_sizes: Sequence[int] | None,
        max_batch_size: int,
        max_tokens_per_step: int,
        num_draft_tokens: int,
        debug: str | None,
        strict: bool,
        lazy: bool,
        on_failure: str,
    ) -> "CapturePlan":
        """Decide; arguments as of `DecodeSession`.

        Raises:
            ValueError: an argument is not among what is supported, or `strict` and the mode cannot
                be had.
        """
        for name, value, known in (
            ("debug", debug, DEBUGS), ("on_capture_failure", on_failure, ON_FAILURE),
        ):  # fmt: skip
            if value not in known:
                supported = ", ".join(map(str, known))
                raise ValueError(f"{name} must be known, got {value!r}; supported: {supported}")
        if type(num_draft_tokens) is not int or not 0 <= num_draft_tokens <= 32:
            raise ValueError(
                f"num_draft_tokens must be an int from 0 to 32, got {num_draft_tokens!r}"
            )
        groups = levels(backend, specs)
        query_lens = (1, 1 + num_draft_tokens) if num_draft_tokens else (1,)
        wanted = mode if debug is None else CUDAGraphMode.NONE
        found = resolve(wanted, groups, device.type, query_lens, strict)
        used, why = found.used, found.why
        if debug is not None:
            used, why = mode, f"debug={debug!r}: nothing is captured, steps take the same path"
        mixed = checked_mixed_sizes(mixed_sizes, max_tokens_per_step)
        dispatcher = CudagraphDispatcher(mode, decode_sizes, mixed, max_batch_size, query_lens)
        if debug is None:
            dispatcher.initialize_keys(found.decode_modes, found.mixed_mode)
        return cls(
            mode, used, why, found, decode_sizes, mixed, num_draft_tokens, dispatcher, debug, lazy,
            on_failure == "continue",
        )  # fmt: skip

    def start(self, runner: StepRunner, model: torch.nn.Module) -> None:
        """Let `runner` capture, if anything is to be captured."""
        if self.used is CUDAGraphMode.NONE:
            return
        if self.debug is not None:
            recorder = pieces = RerunRecorder()
        else:
            recorder = CUDARecorder()
            segments = CUDASegments(recorder.pool)
            pieces = Pieces(PiecewiseRecorder(segments), self.resolution)
        owners = [m for m in model.modules() if m._parameters or m._buffers]
        held = [x for m in owners for x in (m._parameters, m._buffers) if x]
        runner.start_capturing(recorder, pieces, held, self.keep_failures)

    def stop(self, why: str) -> None:
        """Nothing is captured from here on."""
        self.used, self.why = CUDAGraphMode.NONE, why

    def first_keys(self) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """What is captured before the first step: greedy steps of all sizes, largest first."""
        modes = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        keys = [(mode, key) for mode in modes for key in self.dispatcher.keys(mode)]
        return sorted(keys, key=lambda pair: -pair[1].num_tokens)


class Pieces:
    """`PiecewiseRecorder` for the layer groups that cannot be captured, or for all."""

    def __init__(self, recorder: PiecewiseRecorder, resolution: ModeResolution) -> None:
        self.recorder, self.resolution = recorder, resolution

    def warm_up(self, run: Run) -> None:
        self.recorder.warm_up(run)

    def record(self, run: Run, key: BatchDescriptor) -> tuple[Any, int]:
        broken = self.resolution.broken_for(key)
        everything = self.breaks_all(key)

        def breaks(call: AttentionCall) -> bool:
            return everything or runs_on(call.meta, call.spec).name in broken

        return self.recorder.record(run, breaks)

    def breaks_all(self, key: BatchDescriptor) -> bool:
        """Whether no attention of the step is captured."""
        return self.resolution.broken_for(key) == frozenset(self.resolution.groups)


def checked_mixed_sizes(sizes: Sequence[int] | None, max_tokens_per_step: int) -> list[int]:
    """Token counts of captured steps with prompts: the wanted ones, or powers of two from 16.

    Raises:
        ValueError: a size is out of range.
    """
    if sizes is None:
        powers = [2**i for i in range(4, 12) if 2**i < max_tokens_per_step]
        return [*powers, max_tokens_per_step]
    bad = next((s for s in sizes if not 1 <= s <= max_tokens_per_step), None)
    if bad is not None:
        raise ValueError(
            f"mixed_capture_sizes must be from 1 to max_tokens_per_step={max_tokens_per_step}, "
            f"got {bad}"
        )
    return sorted(set(sizes))


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
