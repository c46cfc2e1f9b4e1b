"""What of a wanted graph mode the attention backends of a model allow."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence

from attn_ops import AttentionCGSupport
from graphs.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode

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
