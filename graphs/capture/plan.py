"""Decides what a session captures, once, before anything is captured.

Attention backends say which CUDA-graph modes they support; the plan joins that with the options.
"""

import dataclasses
import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
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
from graphs.capture.memory import estimate
from graphs.capture.piecewise import Breaks, CUDASegments, PiecewiseRecorder
from graphs.capture.pool import GraphPool
from graphs.capture.recorder import Builder, Recorder, RerunRecorder, WholeRecorder
from graphs.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode
from graphs.options import SessionOptions

logger = logging.getLogger(__name__)

NOTHING_BROKEN: frozenset[str] = frozenset()

_AS_ASKED = "asked for"


@dataclasses.dataclass(frozen=True)
class ModeResolution:
    """A graph mode as it was asked for and as it is used, for every kind of batch.

    A kind is the query length of uniform batches, or None for mixed ones.
    """

    asked: CUDAGraphMode
    modes: Mapping[int | None, CUDAGraphMode]  # runtime mode by kind
    broken: Mapping[int | None, frozenset[str]]  # by kind: layer groups that run between graphs
    groups: Mapping[str, AttentionCGSupport]  # all layer groups
    why: str  # of what was lowered, and what would change it
    by_default: bool = False  # nobody asked: the session chose `asked`
    reachable: bool = True  # the device has graphs, or debugging does without

    @property
    def decode_modes(self) -> dict[int, CUDAGraphMode]:
        """Runtime modes of uniform batches by query length."""
        return {q: mode for q, mode in self.modes.items() if q is not None}

    @property
    def decode_mode(self) -> CUDAGraphMode:
        """The lowest of `decode_modes`."""
        return max(self.decode_modes.values(), key=RUNTIME_MODES.index)

    @property
    def mixed_mode(self) -> CUDAGraphMode:
        """Runtime mode of mixed batches."""
        return self.modes[None]

    @property
    def used(self) -> CUDAGraphMode:
        """The mode in use as one name; PIECEWISE also where that holds for decode steps only."""
        return CUDAGraphMode.of(self.decode_mode, self.mixed_mode)

    @property
    def lowered(self) -> bool:
        """Whether less is captured than was asked for."""
        return any(mode is not _asked(self.asked, kind) for kind, mode in self.modes.items())

    def in_debugging(self, why: str) -> "ModeResolution":
        """The same modes without graphs: where they would be broken, all attention is planned."""
        everything = frozenset(self.groups)
        broken = {
            kind: everything if mode is CUDAGraphMode.PIECEWISE else NOTHING_BROKEN
            for kind, mode in self.modes.items()
        }
        return dataclasses.replace(self, broken=broken, why=why)

    def stopped(self, why: str) -> "ModeResolution":
        """Nothing is captured any more."""
        modes = dict.fromkeys(self.modes, CUDAGraphMode.NONE)
        broken = dict.fromkeys(self.modes, NOTHING_BROKEN)
        return dataclasses.replace(self, modes=modes, broken=broken, why=why)

    def broken_for(self, key: BatchDescriptor) -> frozenset[str]:
        """Layer groups that run between the graphs of a key."""
        return self.broken[key.query_len]

    def in_words(self) -> str:
        """What was asked, what is used and why, in one line."""
        asked, used, how = self.asked.name, self.used.name, "asked for"
        if self.by_default:
            if not self.reachable:
                return f"none: {self.why}"
            how = "by default"
        if self.why == _AS_ASKED:
            return f"{used}, {how}"
        return f"{asked} {how}, {used} used: {self.why}"

    def lines(self) -> list[str]:
        """One line a kind of batch: what is used, what was asked, what runs between graphs.

        There are none where nobody asked and the device has no graphs.
        """
        if self.by_default and not self.reachable:
            return []
        lines = []
        for kind, mode in self.modes.items():
            asked = _asked(self.asked, kind)
            taken = mode.name if mode is asked else f"{asked.name} asked for, {mode.name} used"
            line = f"{_name(kind)}: {taken}"
            if self.broken[kind]:
                line += f", between graphs: {', '.join(sorted(self.broken[kind]))}"
            lines.append(line)
        return lines


def resolve(
    mode: CUDAGraphMode,
    groups: Mapping[str, AttentionCGSupport],
    device_type: str,
    uniform_query_lens: Sequence[int] = (1,),
    strict: bool = False,
    debug: str | None = None,
    by_default: bool = False,
) -> ModeResolution:
    """What can be captured. It is logged, as a warning if it is less than what was asked for.

    Where the level of a layer group does not reach a kind of batch, such steps are captured all
    the same, and the graph is broken around that group's layers. Where attention was asked to run
    between graphs, it does in all layers.

    Args:
        mode: what was asked for.
        groups: level of each group of layers that share a backend.
        device_type: where the model is.
        uniform_query_lens: tokens of every request in uniform batches: 1, and 1 + k with drafts.
        strict: refuse to capture less than was asked for.
        debug: what the session runs instead of graphs; on any device, as graphs would on CUDA.
        by_default: nobody asked for the mode; no warning where the device has no graphs at all.

    Raises:
        ValueError: there is no query length or one is below 1, or `strict` and the mode cannot be
            had.
    """
    if not uniform_query_lens or min(uniform_query_lens) < 1:
        raise ValueError(
            f"uniform_query_lens must be at least 1 each, got {list(uniform_query_lens)}"
        )
    kinds: list[int | None] = [*sorted(set(uniform_query_lens)), None]
    reachable = device_type == "cuda" or debug is not None
    weak = {kind: _weak(mode, groups, kind) if reachable else NOTHING_BROKEN for kind in kinds}
    modes = {kind: _used(_asked(mode, kind), weak[kind], reachable) for kind in kinds}
    broken = {
        kind: frozenset(groups)
        if modes[kind] is CUDAGraphMode.PIECEWISE is _asked(mode, kind)
        else weak[kind]
        for kind in kinds
    }
    why = _AS_ASKED
    if not reachable and mode is not CUDAGraphMode.NONE:
        why = f"the model is on {device_type}; CUDA graphs need a model on cuda"
    elif any(weak.values()):
        why = "; ".join(_reasons(groups, weak))
    resolution = ModeResolution(mode, modes, broken, dict(groups), why, by_default, reachable)
    _tell(resolution, strict, debug, quiet=by_default and not reachable)
    return resolution


def takes(level: AttentionCGSupport, query_len: int | None) -> bool:
    """Whether attention of a level can be captured for a kind of batch."""
    if query_len is None:
        needed = AttentionCGSupport.ALWAYS
    elif query_len > 1:
        needed = AttentionCGSupport.UNIFORM_BATCH
    else:
        needed = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return level.value >= needed.value


def _asked(mode: CUDAGraphMode, kind: int | None) -> CUDAGraphMode:
    return mode.mixed_mode() if kind is None else mode.decode_mode()


def _weak(
    mode: CUDAGraphMode, groups: Mapping[str, AttentionCGSupport], kind: int | None
) -> frozenset[str]:
    """Groups that cannot do what was asked of this kind of batch."""
    if _asked(mode, kind) is not CUDAGraphMode.FULL:
        return NOTHING_BROKEN
    return frozenset(name for name, level in groups.items() if not takes(level, kind))


def _used(asked: CUDAGraphMode, weak: Collection[str], reachable: bool) -> CUDAGraphMode:
    if not reachable:
        return CUDAGraphMode.NONE
    return CUDAGraphMode.PIECEWISE if weak else asked


def _reasons(
    groups: Mapping[str, AttentionCGSupport], weak: Mapping[int | None, frozenset[str]]
) -> list[str]:
    """A sentence for each weak group."""
    reasons = []
    for name, level in groups.items():
        kinds = [kind for kind, names in weak.items() if name in names]
        if not kinds:
            continue
        needed = next(
            known.name
            for known in sorted(AttentionCGSupport, key=lambda known: known.value)
            if all(takes(known, kind) for kind in kinds)
        )
        reasons.append(
            f"{name} has level {level.name} and runs between graphs in "
            f"{' and '.join(_name(kind) for kind in kinds)}; "
            f"choose a backend of at least level {needed} for it"
        )
    return reasons


def _name(kind: int | None) -> str:
    if kind is None:
        return "mixed batches"
    return "decode batches" if kind == 1 else f"uniform batches of {kind} tokens a request"


def _tell(resolution: ModeResolution, strict: bool, debug: str | None, *, quiet: bool) -> None:
    """Log what is captured; as a warning if it is less than what was asked for, unless `quiet`."""
    asked, used = resolution.asked.name, resolution.used.name
    if not resolution.lowered:
        how = "asked for and used" if debug is None else f"asked for, run by debug={debug!r}"
        logger.info("cudagraph_mode %s %s", asked, how)
        return
    if strict:
        raise ValueError(
            f"cudagraph_mode must be within reach with strict=True, got {asked}; "
            f"supported: {used}, because {resolution.why}"
        )
    how = "used" if debug is None else f"run by debug={debug!r}"
    log = logger.info if quiet else logger.warning
    log("cudagraph_mode %s asked for, %s %s: %s", asked, used, how, resolution.why)


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
        *,
        split: bool = False,
    ) -> "CapturePlan":
        """Decide. `sizes`: see `memory.sizes_of`.

        By default no prompts are captured of a model `split` over ranks, whose times differ.

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
        takes_prompts = not split and all(takes(level, None) for level in groups.values())
        if options.any_mode and not takes_prompts:
            mode = CUDAGraphMode.FULL_DECODE_ONLY
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
