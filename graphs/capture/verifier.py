"""Compares replays with calls: runs the same step on the same state twice.

    state, rows -> replay -> results -> state, rows restored -> call -> results compared -> replay's

S requests, R rows of logits, V vocabulary, P blocks, B block size, K kv heads, H head size, W rows
of the cache that a step writes.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_ops.metadata import kv_dtype_of
from attn_ops.states import NULL_SLOT

TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
}
"""Largest difference that passes, as a part of the called tensor's largest magnitude.

A replay is planned for other bounds than a call, so its kernels add in another order. FP8 caches
have that of bfloat16, and one step of the format on top. An output or a state in float32 has that
of the model's dtype: it is no more exact than what it was computed from.
"""


class States(NamedTuple):
    """Pools of layers that keep states, and which states a step changes."""

    pools: Mapping[str, torch.Tensor]  # [P, ...] each
    slots: torch.Tensor  # [N] int32; those of padding are 0
    wanted: torch.Tensor  # [N] bool; the others lie behind rows that nobody wants


@dataclasses.dataclass(frozen=True)
class Finding:
    """How one tensor of the replay compares with the call's."""

    tensor: str
    difference: float  # the largest absolute one
    tolerance: float  # what passes; of FP8 besides a step of the format
    num_differing: int  # elements beyond it
    num_elements: int
    where: tuple[int, ...] = ()  # of the largest difference beyond it
    why: str = ""  # what else is wrong

    @property
    def ok(self) -> bool:
        return not self.num_differing

    def __str__(self) -> str:
        if self.why:
            return f"{self.tensor}: {self.why}"
        return (
            f"{self.tensor} differing by {self.difference:.4g} at {list(self.where)}, "
            f"{self.num_differing} of {self.num_elements} elements beyond {self.tolerance:.4g}"
        )


def compare(
    name: str,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    tolerance: float,
    step: torch.finfo | None = None,
) -> Finding:
    """The replay's tensor against the call's.

    Args:
        name: of the tensor.
        mine: the replay's.
        theirs: the call's.
        tolerance: as a part of the largest finite magnitude of `theirs`; not used for integers.
        step: of the format that both were rounded to; a step of each value passes besides.
    """
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        why = f"{mine.dtype} {list(mine.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
        return Finding(name, math.inf, 0.0, max(1, mine.numel()), mine.numel(), (), why)
    if not mine.numel():
        return Finding(name, 0.0, 0.0, 0, 0)
    if mine.is_floating_point():
        gap, allowed, bound = _gaps(mine, theirs, tolerance, step)
    else:
        gap, allowed, bound = (mine.long() - theirs.long()).abs(), torch.tensor(0), 0.0
    beyond = gap > allowed.to(gap.device)
    num_differing, where = int(beyond.sum()), ()
    if num_differing:
        worst = int(torch.where(beyond, gap, -1).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), mine.shape))
    return Finding(name, gap.max().item(), bound, num_differing, mine.numel(), where)


def _gaps(
    mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, step: torch.finfo | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Differences of floats, those that pass, and the part of them that all elements share."""
    wide = torch.promote_types(mine.dtype, torch.float32)
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())  # infinities of one sign too
    gap = torch.where(same, 0.0, (mine - theirs).abs()).nan_to_num_(math.inf, posinf=math.inf)
    size = theirs.abs().nan_to_num_(0.0, posinf=0.0)
    bound = tolerance * size.max()
    allowed = bound
    if step is not None:
        larger = torch.maximum(size, mine.abs().nan_to_num_(0.0, posinf=0.0))
        allowed = bound + step.eps * larger.clamp_(min=step.smallest_normal)
    return gap, allowed, bound.item()


def excused_rows(
    replayed: Mapping[str, torch.Tensor],
    called: Mapping[str, torch.Tensor],
    bound: float,
    draw: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor | None:
    """Rows [R] whose tokens differ but are equally right; None if none is."""
    mine_R, theirs_R, logits_RV = replayed["tokens"], called["tokens"], called["logits"]
    if not mine_R.shape == theirs_R.shape == logits_RV.shape[:-1] or mine_R.dim() != 1:
        return None
    differ_R = mine_R != theirs_R
    if not bool(differ_R.any()):
        return None
    if draw is not None:
        return differ_R & (draw(replayed["logits"]) == mine_R)
    last = logits_RV.shape[1] - 1
    known_R = (mine_R >= 0) & (mine_R <= last) & (theirs_R >= 0) & (theirs_R <= last)
    two_R2 = torch.stack([mine_R, theirs_R], 1).clamp(0, last)
    pair_R2 = logits_RV.gather(1, two_R2).double()
    return differ_R & known_R & ((pair_R2[:, 0] - pair_R2[:, 1]).abs() <= bound)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_halves(cache: torch.Tensor) -> torch.Tensor:
    """[P, n, B, K, H], n = 2 for keys and values; of a cache of latents [P, B, W] n and K are 1."""
    return cache if cache.dim() == 5 else cache[:, None, :, None]


def row_sums(cache: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of every row [P, n, B] that also changes when elements trade places."""
    bits = cache.view(_BITS[cache.element_size()])  # of the same size, so any strides will do
    num_blocks, heads, size = cache.shape[0], *cache.shape[3:]
    weights_KH = torch.arange(heads * size, device=cache.device).view(heads, size) * 2 + 1
    # In parts, as the products are int64: 128 MiB at most.
    part = max(1, (1 << 24) // max(1, cache[0].numel()))
    sums = [(bits[i : i + part] * weights_KH).sum((3, 4)) for i in range(0, num_blocks, part)]
    return torch.cat(sums)


def stray_writes(
    layer: int, cache: torch.Tensor, before_P2B: torch.Tensor, slots_W: torch.Tensor
) -> Finding:
    """Rows that changed although the step does not own them; those of the null block may."""
    block_size = cache.shape[2]
    changed_P2B = row_sums(cache) != before_P2B
    changed_P2B[0] = False
    changed_P2B[slots_W // block_size, :, slots_W % block_size] = False
    name, num_rows = f"kv_caches[{layer}]", int(changed_P2B.sum())
    if not num_rows:
        return Finding(name, 0.0, 0.0, 0, changed_P2B.numel())
    block, which, offset = changed_P2B.nonzero()[0].tolist()
    why = f"{num_rows} rows written outside the step's slots, first [{block}, {which}, {offset}]"
    where = (block, which, offset)
    return Finding(name, math.inf, 0.0, num_rows, changed_P2B.numel(), where, why)


def checked_tolerances(
    tolerance: float | Mapping[torch.dtype, float] | None,
) -> dict[torch.dtype, float]:
    """`TOLERANCES` with a user's own in place; a ValueError says what is wrong with them."""
    if tolerance is None:
        return TOLERANCES
    own = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(TOLERANCES, tolerance)
    for dtype, value in own.items():
        if dtype not in TOLERANCES or not 0 <= value < math.inf:
            names = ", ".join(map(str, TOLERANCES))
            raise ValueError(
                "tolerance must be finite and not negative, of a known dtype, "
                f"got {value!r} for {dtype}; supported: {names}"
            )
    return {**TOLERANCES, **own}


class VerificationError(RuntimeError):
    """A replay and a call of the same step differ.

    The step's state and the rows of the cache that it writes are as they were before it; rows that
    it must not write are as the replay left them.

    Attributes:
        key: of the graph.
        tensor: the first that differs, in the order in which a step computes them.
        difference: the largest absolute one; inf where one side only has NaN or infinity,
            where shapes or dtypes differ, and for rows of the cache outside the step's slots.
        dump: the directory with both results; None where it could not be written.
    """

    def __init__(
        self, message: str, key: Hashable, tensor: str, difference: float, dump: Path | None
    ) -> None:
        super().__init__(message)
        self.key, self.tensor, self.difference, self.dump = key, tensor, difference, dump


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What a step leaves, or finds."""

    state: torch.Tensor
    rows: list[torch.Tensor]  # [W, 2, K, H] of every cache
    more: list[torch.Tensor]
    outputs: dict[str, torch.Tensor]
    states: list[torch.Tensor]  # of the step's requests


@dataclasses.dataclass(frozen=True)
class _Touched:
    """All that a step may change."""

    state: torch.Tensor  # bytes
    caches: Sequence[torch.Tensor]  # as `in_halves` gives them
    slots: list[torch.Tensor]  # of every cache [W] int64, none padding or in the null block
    more: Mapping[str, torch.Tensor]
    states: Mapping[str, torch.Tensor]  # [P, ...] each
    own_states: torch.Tensor  # int64, which of the P the step changes
    wanted: torch.Tensor  # bool, which of those are compared

    @classmethod
    def of(
        cls,
        state: torch.Tensor,
        caches: Sequence[torch.Tensor],
        slots: torch.Tensor | Sequence[torch.Tensor],
        more: Mapping[str, torch.Tensor],
        states: States | None,
    ) -> "_Touched":
        assert state.dtype == torch.uint8, f"state must be bytes, got {state.dtype}"
        caches = [in_halves(cache) for cache in caches]
        given = [slots] * len(caches) if isinstance(slots, torch.Tensor) else slots
        checked: dict[tuple[int, int], torch.Tensor] = {}
        found = []
        for one, cache in zip(given, caches, strict=True):
            kind = id(one), cache.shape[0]
            if kind not in checked:
                checked[kind] = cls._checked(one, cache)
            found.append(checked[kind])
        none = state.new_zeros(0)
        pools, slots_N, wanted_N = states or States({}, none, none)
        own_N = slots_N != NULL_SLOT
        own = slots_N[own_N].long(), wanted_N[own_N]
        return cls(state, caches, found, more, pools, *own)

    @staticmethod
    def _checked(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Slots of a cache that are no padding."""
        assert slots.dtype == torch.int64, f"slots must be int64, got {slots.dtype}"
        num_blocks, _, block_size = cache.shape[:3]
        # A copy, as `slots` may be a view of the state, which a step changes.
        slots_W = slots[slots >= block_size]
        if slots_W.numel() and int(slots_W.max()) >= num_blocks * block_size:
            raise ValueError(
                f"slots must be below {num_blocks * block_size}, the cache's tokens, "
                f"got {int(slots_W.max())}"
            )
        return slots_W

    def save(self, outputs: Callable[[], Mapping[str, torch.Tensor]] | None = None) -> _Saved:
        rows = [cache[*self._rows_of(i)] for i, cache in enumerate(self.caches)]
        more = [t.clone() for t in self.more.values()]
        results = {} if outputs is None else {n: t.clone() for n, t in outputs().items()}
        states = [pool[self.own_states] for pool in self.states.values()]
        return _Saved(self.state.clone(), rows, more, results, states)

    def restore(self, saved: _Saved) -> None:
        self.state.copy_(saved.state)
        for i, rows in enumerate(saved.rows):
            self.caches[i].index_put_(self._rows_of(i), rows)
        for tensor, old in zip(self.more.values(), saved.more, strict=True):
            tensor.copy_(old)
        for pool, old in zip(self.states.values(), saved.states, strict=True):
            pool.index_copy_(0, self.own_states, old)

    def slots_on_cpu(self) -> torch.Tensor | list[torch.Tensor]:
        """Those of all caches; of each cache, where they differ."""
        first = [one.cpu() for one in self.slots[:1]]
        same = all(one is self.slots[0] for one in self.slots)
        return first[0] if first and same else [one.cpu() for one in self.slots]

    def _rows_of(self, number: int) -> tuple[torch.Tensor, ...]:
        """Indices of a cache's base tensor, so that no view of other strides is materialised."""
        cache, slots_W1 = self.caches[number], self.slots[number].unsqueeze(1)
        half_n = torch.arange(cache.shape[1], device=cache.device)
        return slots_W1 // cache.shape[2], half_n, slots_W1 % cache.shape[2]


class Verifier:
    """Decides which replays are compared with a call, and compares them.

    Args:
        mode: "first" replay of every key; an int N, the first and every N-th after it; "always";
            None, never.
        tolerance: in place of `TOLERANCES`, for every dtype or by dtype; a dtype's own is not
            widened.
        kv_cache_dtype: what uint8 caches hold: fp8_e4m3 or fp8_e5m2; auto: they are integers.
        directory: where dumps go, each into a new directory; default: the system's for temporary
            files.
        strict_writes: also find writes into the cache outside a step's slots. Reads the whole cache
            twice a check.

    Attributes:
        num_checked: replays that were compared.
        num_forgiven: tokens that differed and were as good as the call's.

    Raises:
        ValueError: an argument is unknown or out of range.
    """

    def __init__(
        self,
        mode: str | int | None,
        *,
        tolerance: float | Mapping[torch.dtype, float] | None = None,
        kv_cache_dtype: str = "auto",
        directory: str | Path | None = None,
        strict_writes: bool = False,
    ) -> None:
        self.mode = mode
        self._interval = _interval(mode)
        self.kv_cache_dtype = kv_cache_dtype
        self._fp8 = kv_dtype_of(kv_cache_dtype)
        self._tolerances = checked_tolerances(tolerance)
        asked = {} if tolerance is None else TOLERANCES
        self._asked = frozenset(tolerance if isinstance(tolerance, Mapping) else asked)
        self.directory = None if directory is None else Path(directory)
        if "\0" in str(self.directory):
            raise ValueError(f"directory must be a path without NUL, got {directory!r}")
        self.strict_writes = strict_writes
        self.num_checked = 0
        self.num_forgiven = 0
        self._num_replays: Counter[Hashable] = Counter()

    def should(self, key: Hashable) -> bool:
        """Whether the replay of `key` that comes now is to be checked; asked once a replay."""
        number = self._num_replays[key]
        self._num_replays[key] += 1
        if self._interval is None:
            return False
        return number % self._interval == 0 if self._interval else number == 0

    def forget(self, key: Hashable) -> None:
        """The graph of `key` was captured anew: its next replay is its first."""
        self._num_replays.pop(key, None)

    @torch.no_grad()
    def check(
        self,
        key: Hashable,
        state: torch.Tensor,
        caches: Sequence[torch.Tensor],
        slots: torch.Tensor | Sequence[torch.Tensor],
        replay: Callable[[], object],
        eager: Callable[[], object],
        outputs: Callable[[], Mapping[str, torch.Tensor]],
        *,
        more: Mapping[str, torch.Tensor] | None = None,
        draw: Callable[[torch.Tensor], torch.Tensor] | None = None,
        states: States | None = None,
        dtypes: Collection[torch.dtype] = (),
    ) -> None:
        """Replay the step, call it from the same state, compare; leaves what the replay computed.

        Every output and every written row of the caches is compared. Integers must be equal, but
        for a row of `tokens` whose `logits` pass: see `draw`. There other integers of that row, of
        outputs with as many rows, are not compared. NaN equals NaN.

        Args:
            key: of the graph.
            state: bytes on the device; all that the step reads and changes, except the rest below.
            caches: [P, 2, B, K, H], or [P, B, Lkv + R] of latents; any strides.
            slots: [T] int64, rows of the caches that the step writes, or a tensor for each cache;
                negative ones and those of the null block are padding and are not compared.
            replay: launches the graph.
            eager: the same step, called.
            outputs: what the last of both gave, by name; copied at once. Padding rows should not be
                among them. `tokens` [R] int64 and `logits` [R, V] belong together.
            more: other tensors that the step changes; saved and restored, not compared.
            draw: tokens [R] for logits [R, V]; run from the state before the step. A token that
                differs passes if it is drawn from the replay's logits. None: if the call's logits
                of the two tokens are within the tolerance of one another, as for an argmax.
            states: of layers that keep some; those that are wanted are compared, too.
            dtypes: in which the model computes.

        Raises:
            VerificationError: they differ.
        """
        touched = _Touched.of(state, caches, slots, more or {}, states)
        before = touched.save()
        try:
            replayed, findings = self._replayed(touched, replay, outputs)
            touched.restore(before)
            eager()
            called = touched.save(outputs)
            findings += self._compare_rows(replayed, called)
            findings += self._compare_states(touched, replayed, called)
            touched.restore(before)
            dtypes = (*dtypes, *(x.dtype for x in called.states))
            findings += self._compare_outputs(replayed.outputs, called.outputs, draw, dtypes)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a device that failed stays failed
                touched.restore(before)
            raise
        self.num_checked += 1
        if all(finding.ok for finding in findings):
            touched.restore(replayed)
            return
        touched.restore(before)  # `draw` may have changed it
        self._num_replays.pop(key, None)  # not found right so far: its next replay is checked too
        raise self._error(key, findings, touched, before, replayed, called)

    # -- comparing ---------------------------------------------------------------------------------

    def _replayed(
        self,
        touched: _Touched,
        replay: Callable[[], object],
        outputs: Callable[[], Mapping[str, torch.Tensor]],
    ) -> tuple[_Saved, list[Finding]]:
        """What the replay leaves, and rows of the caches that it must not have written."""
        caches = touched.caches
        sums = [row_sums(c) for c in caches] if self.strict_writes else []
        replay()
        saved = touched.save(outputs)
        return saved, [stray_writes(i, caches[i], s, touched.slots[i]) for i, s in enumerate(sums)]

    def _bound(self, dtype: torch.dtype, dtypes: Collection[torch.dtype]) -> float:
        """The tolerance of a tensor that was computed in `dtypes`."""
        from_these = () if dtype in self._asked else dtypes
        return max(self._tolerances.get(one, 0.0) for one in (dtype, *from_these))

    def _compare_rows(self, replayed: _Saved, called: _Saved) -> list[Finding]:
        findings = []
        for layer, (mine, theirs) in enumerate(zip(replayed.rows, called.rows, strict=True)):
            step = None
            if self._fp8 is not None and mine.dtype == torch.uint8:
                step = torch.finfo(self._fp8)
                mine, theirs = (x.view(self._fp8).float() for x in (mine, theirs))
            dtype = torch.bfloat16 if step else mine.dtype
            names = ("keys", "values") if mine.shape[1] == 2 else ("latents",)
            for i, name in enumerate(names):
                name = f"kv_caches[{layer}].{name}"
                bound = self._tolerances.get(dtype, 0.0)
                findings.append(compare(name, mine[:, i], theirs[:, i], bound, step))
        return findings

    def _compare_states(self, touched: _Touched, replayed: _Saved, called: _Saved) -> list[Finding]:
        dtypes = {x.dtype for x in called.states}
        return [
            compare(
                name, mine[touched.wanted], theirs[touched.wanted], self._bound(mine.dtype, dtypes)
            )
            for name, mine, theirs in zip(
                touched.states, replayed.states, called.states, strict=True
            )
        ]

    def _compare_outputs(
        self,
        replayed: Mapping[str, torch.Tensor],
        called: Mapping[str, torch.Tensor],
        draw: Callable[[torch.Tensor], torch.Tensor] | None,
        dtypes: Collection[torch.dtype],
    ) -> list[Finding]:
        assert list(replayed) == list(called), "outputs must have the same names both times"
        names = sorted(replayed, key=lambda name: not replayed[name].is_floating_point())
        findings, excused = {}, None
        for name in names:  # floats come first: tokens are excused by their logits
            mine, theirs = replayed[name], called[name]
            if mine.is_floating_point():
                bound = self._bound(mine.dtype, dtypes)
                findings[name] = compare(name, mine, theirs, bound)
        if "tokens" in names and "logits" in names and findings["logits"].ok:
            excused = excused_rows(replayed, called, findings["logits"].tolerance, draw)
        for name in (n for n in names if n not in findings):
            mine, theirs = replayed[name], called[name]
            rows = None if excused is None else excused.shape
            if excused is not None and mine.shape == theirs.shape and mine.shape[:1] == rows:
                mine = torch.where(excused.view(-1, *[1] * (mine.dim() - 1)), theirs, mine)
            findings[name] = compare(name, mine, theirs, 0.0)
        self.num_forgiven += 0 if excused is None else int(excused.sum())
        return list(findings.values())

    # -- reporting ---------------------------------------------------------------------------------

    def _error(
        self,
        key: Hashable,
        findings: list[Finding],
        touched: _Touched,
        before: _Saved,
        replayed: _Saved,
        called: _Saved,
    ) -> VerificationError:
        wrong = [finding for finding in findings if not finding.ok]
        report = {
            "key": str(key),
            "mode": self.mode,
            "torch": torch.__version__,
            "device": str(touched.state.device),
            "differing": [dataclasses.asdict(finding) for finding in wrong],
            "equal": [dataclasses.asdict(finding) for finding in findings if finding.ok],
        }
        dump, written = None, ""
        try:
            dump = _new_directory(self.directory)
            inputs = {"slots": touched.slots_on_cpu(), **_on_cpu(before, touched)}
            torch.save(inputs, dump / "inputs.pt")
            torch.save(_on_cpu(replayed, touched), dump / "replay.pt")
            torch.save(_on_cpu(called, touched), dump / "eager.pt")
            (dump / "report.json").write_text(json.dumps(report, indent=2) + "\n")
            written = f"both results are in {dump}"
        except (OSError, RuntimeError) as error:  # a full disk must not hide what was found
            dump, written = None, f"no dump: {error}"
        first, others = wrong[0], f"; {len(wrong) - 1} more tensors differ" if wrong[1:] else ""
        message = f"replay of {key} must equal a call of the same step, got {first}{others}"
        return VerificationError(f"{message}; {written}", key, first.tensor, first.difference, dump)


def _interval(mode: Any) -> int | None:
    """Replays of a key between checks; 0: only the first is checked, None: none is."""
    if mode is None or mode == "first":
        return None if mode is None else 0
    if mode == "always":
        return 1
    if isinstance(mode, int) and not isinstance(mode, bool) and mode >= 1:
        return mode
    raise ValueError(
        f"verify must be known, got {mode!r}; supported: first, always, an int of at least 1, None"
    )


def _new_directory(parent: Path | None) -> Path:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="attn-ops-verify-", dir=parent))


def _on_cpu(saved: _Saved, touched: _Touched) -> dict[str, Any]:
    return {
        "state": saved.state.cpu(),
        "kv_caches": [rows.cpu() for rows in saved.rows],
        "more": {n: t.cpu() for n, t in zip(touched.more, saved.more, strict=True)},
        "outputs": {name: t.cpu() for name, t in saved.outputs.items()},
        "states": {n: t.cpu() for n, t in zip(touched.states, saved.states, strict=True)},
    }
