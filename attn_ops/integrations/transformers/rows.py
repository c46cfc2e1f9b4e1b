"""Forwards of a few rows, and whether rows meet anywhere but in attention.

T rows of the batch, R rows whose logits are wanted, V vocabulary.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from attn_ops.integrations.transformers.forward import MaskGiven
from attn_ops.integrations.transformers.layers import NAME, check_logits
from attn_ops.integrations.transformers.masks import tagged_masks
from attn_ops.integrations.transformers.probe import AttentionProbe, ProbedCall
from attn_ops.integrations.transformers.specs import attention_layers
from attn_ops.integrations.transformers.states import OURS, ProbedState
from attn_ops.integrations.transformers.ties import KeptTies
from attn_ops.states import StateSpec

NUM_ROWS = 12

Spoil = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A row of embedded tokens in place of one, from it and the one after it."""

_LOGITS = "row of logits"

_OF_ROWS = object()
"""Positions that are the rows' numbers."""


class Forward(Protocol):
    """Calls the uncompiled model as a step does, with the probe as its metadata.

    input_ids and position_ids [1, T] int64, logits_rows [R] int64, attention_mask [1, T] or None.
    position_ids may be None, or what the model's own `generate` makes. Returns the logits,
    [1, R, V].
    """

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        logits_rows: torch.Tensor,
        probe: AttentionProbe,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What one forward showed."""

    calls: list[ProbedCall]
    dtype: torch.dtype  # of the model; logits are often made wider at its end
    logits: torch.Tensor  # [R, V]
    rows: torch.Tensor  # [T]: number of each row in the first run
    logits_rows: torch.Tensor  # [R]
    states: list[StateSpec]  # that were used, in order
    state_layers: list[tuple[Any, tuple, dict[str, Any]]]  # and what each was called with

    def traces(self) -> list[tuple[str, torch.Tensor]]:
        """Name and value [T, ...] of every q, k and v, in order."""
        found = []
        for call in self.calls:
            parts = (("query", call.q), ("key", call.k), ("value", call.v))
            found += [(f"{part} of {call.name}", x) for part, x in parts]
        return found


class Probes:
    """The forwards that are compared."""

    def __init__(self, model: Any, forward: Forward, vocab_size: int, num_rows: int) -> None:
        self.model, self.forward = model, forward
        device = next(model.parameters()).device
        self.ids = _ordinary_tokens(model, vocab_size, num_rows).to(device)
        self.rows = torch.arange(num_rows, device=device)
        kept = self.rows.flip(0)
        self.kept = kept[kept % 5 != 1] if num_rows > 2 else kept
        self.spoilt = 1 if self.kept.numel() > 2 else None  # the row of NaN in the second batch
        self.chosen: list[torch.Tensor] = []  # by routers, in the forward of all rows in order

    def in_order(self) -> Run:
        """All rows in order, with logits of each and masks that can be compared."""
        self.chosen.clear()
        if not attention_layers(self.model):  # such models multiply by the mask
            return self._run(self.rows, self.rows)
        mask = torch.ones_like(self.rows)[None]
        with tagged_masks(NAME):
            try:
                return self._run(self.rows, self.rows, mask)
            except TypeError as error:
                if "unexpected keyword" not in str(error):
                    raise
                self.chosen.clear()
                return self._run(self.rows, self.rows)  # the model takes no mask

    def placed(self) -> Run | None:
        """All rows, with the positions that `generate` gives; None: those of `in_order`."""
        positions = _generate_positions(self.model, self.ids[None], self.rows[None])
        if positions is not None and bool((positions == self.rows).all()):
            return None
        return self._run(self.rows, self.rows, positions=positions)

    def some(self) -> Run:
        """Fewer rows in another order, one of them NaN: every row that reads it becomes NaN.

        If a hook raises on NaN, the row is finite.
        """
        try:
            return self._spoilt(lambda own, after: own * float("nan"))
        except ValueError:
            raise
        except Exception:
            return self.another()

    def another(self) -> Run:
        """The same, with a finite row in place of the row of NaN."""
        return self._spoilt(lambda own, after: own * -8.0)

    def close(self) -> Iterator[Run]:
        """The same, with a row that is nearly the one after it, more or less.

        Rows that attend by likeness see themselves alone, to rounding, among rows that differ. The
        row after a close one sees that one too.
        """
        for part in (0.3, -0.3, 0.1, -0.1, 0.03, -0.03):
            yield self._spoilt(lambda own, after, part=part: after + part * own)

    def parts(self) -> Iterator[Run]:
        """The last row alone, as in a decode step, and a few others."""
        for rows in (self.rows[-1:], self.rows[:4:3], self.rows[1::2]):
            if rows.numel():
                yield self._run(rows, self.rows[: rows.numel()])

    def _spoilt(self, spoil: Spoil) -> Run:
        wanted = self.rows[: self.kept.numel()]
        if wanted.numel() > 4:  # neither the last row nor the row of NaN
            wanted = wanted[wanted != self.spoilt][:-1]
        if not _is_exact(self.model.dtype):
            wanted = wanted[:3]  # one of three is more than the quarter that may differ
        with _spoiling(self.model, self.spoilt, self.kept.numel(), spoil):
            return self._run(self.kept, wanted)

    def _run(
        self,
        rows: torch.Tensor,
        wanted: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: Any = _OF_ROWS,
    ) -> Run:
        probe = AttentionProbe(module_names(self.model))
        more = {} if mask is None else {"attention_mask": mask}
        positions = rows[None] if positions is _OF_ROWS else positions
        try:
            with KeptTies(self.chosen, rows if self.chosen else None):
                logits = self.forward(self.ids[rows][None], positions, wanted, probe, **more)
        except MaskGiven as error:
            raise ValueError(
                "attention_mask must be left to the batch's metadata, got "
                f"{type(self.model).__name__}, which makes a padding mask where it is given none"
            ) from error
        except (AttributeError, TypeError) as error:
            if ProbedState.__name__ not in str(error):
                raise
            raise ValueError(
                f"layers with a state must only hand it to {', '.join(OURS)}, got one that does "
                f"more with it: {error}"
            ) from error
        for call in probe.calls:
            if call.q.shape[0] != rows.numel():
                raise ValueError(
                    f"{call.name} must attend from a row a token, got {call.q.shape[0]} rows for "
                    f"{rows.numel()} tokens; supported: no virtual tokens (prompt tuning)"
                )
        check_logits(logits, wanted.numel())
        return Run(
            probe.calls, self.model.dtype, logits[0], rows, wanted, probe.states, probe.state_layers
        )


def module_names(model: Any) -> dict[int, str]:
    """The name of every module, by id; the first name of a module in two places."""
    return {id(module): name for name, module in reversed(list(model.named_modules()))}


def _ordinary_tokens(model: Any, vocab_size: int, count: int) -> torch.Tensor:
    """Token ids without a special meaning in the config, such as padding or images."""
    special = {v for v in vars(model.config).values() if type(v) is int}
    special |= {v for v in vars(model.config.get_text_config()).values() if type(v) is int}
    ordinary = [i for i in range(min(vocab_size, 4096)) if i not in special] or [0]
    return torch.tensor([ordinary[(7 * i + 3) % len(ordinary)] for i in range(count)])


def _generate_positions(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor | None:
    """What the model is given as [..., T] positions by its own `generate`; None: it is given none.

    A model without such a method, or whose method wants more, takes those it is given.
    """
    try:
        made = model.prepare_inputs_for_generation(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            position_ids=position_ids,
            use_cache=False,
        )
        return made.get("position_ids")
    except Exception:
        return position_ids


@contextlib.contextmanager
def _spoiling(model: Any, row: int | None, num_rows: int, spoil: Spoil) -> Iterator[None]:
    """Change one row of the embedded tokens, inside the block and in this thread."""
    embedding, thread = embedding_of(model), threading.get_ident()
    if row is None or embedding is None:
        yield
        return

    def spoiled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        mine = threading.get_ident() == thread
        if not mine or output.dim() != 3 or output.shape[1] != num_rows:
            return output
        spoilt = output.clone()
        spoilt[:, row] = spoil(output[:, row], output[:, row + 1])
        return spoilt

    handle = embedding.register_forward_hook(spoiled)
    try:
        yield
    finally:
        handle.remove()


def embedding_of(model: Any) -> Any:
    """The input embeddings; None if the model does not name them."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def check_rows(first: Run, run: Run, probes: Probes) -> None:
    """Rows meet in attention alone: each has the same values in any place, beside any others."""
    spoilt = probes.spoilt if run.rows.numel() == probes.kept.numel() else None
    found = _first_difference(first, run, spoilt)
    if found is not None and found[1] == "all":  # one FP8 scale for all rows does that too
        other = probes.another()
        found = _first_difference(first, other, spoilt)
        if found is None and spoilt is not None:
            names = (_of_row_alone(other, close, spoilt + 1) for close in probes.close())
            found = next(((name, "some") for name in names if name), None)
    if found is not None:
        raise ValueError(
            "rows of a batch must meet in attention only, and depend on their own token and "
            f"position, got another {found[0]} for rows that stood elsewhere and beside others; "
            "supported: models that take input_ids and position_ids, without statistics over "
            "tokens outside their attention, whose convolutions and recurrences call "
            f"{', '.join(OURS)}"
        )


def check_positions(first: Run, placed: Run | None) -> None:
    """The model computes with positions from 0 on what its own `generate` lets it compute."""
    found = None if placed is None else _first_difference(first, placed, None)
    if found is not None:
        raise ValueError(
            "position_ids must count from 0, as a session gives them, got a model whose own "
            f"generate gives others or none: another {found[0]}; supported: models that compute "
            "the same from both"
        )


def _first_difference(first: Run, second: Run, spoilt: int | None) -> tuple[str, str] | None:
    """The first value that differs, and how: "all" rows have become NaN, or "some" differ."""
    sound = torch.ones_like(second.rows, dtype=torch.bool)
    if spoilt is not None:
        sound[spoilt] = False
    pairs = [
        (name, before[second.rows[sound]], now[sound])
        for (name, before), (_, now) in zip(first.traces(), second.traces(), strict=False)
    ]
    kept = sound[second.logits_rows]
    before = first.logits[second.rows[second.logits_rows[kept]]]
    pairs.append((_LOGITS, before, second.logits[kept]))
    for name, before, now in pairs:
        of_model = name == _LOGITS  # which may be made wider than they were computed
        kind = differ(before, now, first.dtype if of_model else before.dtype)
        if kind:
            return name, kind
    return None


def _of_row_alone(one: Run, other: Run, row: int) -> str | None:
    """The first value in which `row` differs and no row after it: a scale changes those too.

    Both runs are of the same rows in the same order, so only rounding may differ.
    """
    tolerance = 1e-5 if _is_exact(one.dtype) else 2e-2
    rows = torch.arange(one.rows.numel(), device=one.rows.device)
    pairs = [
        (name, rows, x, y) for (name, x), (_, y) in zip(one.traces(), other.traces(), strict=False)
    ]
    pairs.append((_LOGITS, one.logits_rows, one.logits, other.logits))
    for name, numbers, x, y in pairs:
        changed = _changed(x, y, tolerance)
        if changed[numbers == row].any() and not changed[numbers > row].any():
            return name
    return None


def differ(before: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> str:
    """Compare [T, ...] row by row: "" for equal, "all" where each row is NaN, else "some".

    Both are computed in `dtype`, or in their own if that is narrower.
    """
    if not before.numel():
        return ""
    if before.shape != now.shape:
        return "some"
    known = before.flatten(1).isfinite().all(1)
    lost = known & now.flatten(1).isnan().any(1)
    if lost.any():
        return "all" if lost.equal(known) else "some"
    if not known.any():
        return ""
    is_exact = _is_exact(dtype) and _is_exact(before.dtype)
    changed = _changed(before[known], now[known], 1e-3 if is_exact else 5e-2)
    # In low precision a router's tie may fall the other way for a few rows.
    return "some" if changed.float().mean() > (0 if is_exact else 0.25) else ""


def _changed(before: torch.Tensor, now: torch.Tensor, tolerance: float) -> torch.Tensor:
    """[T] bool: which rows of [T, ...] differ by more than `tolerance` of the largest value."""
    before, now = before.float().flatten(1), now.float().flatten(1)
    scale = before.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return (now - before).abs().amax(1) > tolerance * scale


def _is_exact(dtype: torch.dtype) -> bool:
    """Whether the dtype is precise enough to require every row to be equal."""
    return dtype in (torch.float32, torch.float64)
