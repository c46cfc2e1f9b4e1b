"""Launches steps, and brings what they draw to the host without waiting for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphs.capture.store import CapturedStep
from graphs.requests.batch import After, Rows
from graphs.runner import LogitsObserver, StepRunner


@dataclasses.dataclass
class LaunchedSteps:
    """A step, or replays of one decode graph, and where the tokens arrive."""

    captured: CapturedStep | None  # None: it was called
    rows: Rows  # of the batch, as they were scheduled
    begun: int  # decode steps of these rows before the first of these
    num_steps: int
    first_row: int  # of the ring of tokens: the row of the first step
    drawn: torch.Tensor  # [N, R] int64, the ring on the device; the next launch may overwrite it
    tokens: torch.Tensor  # [N, R] int64, a copy of the ring; pinned where the device is a GPU
    logprobs: torch.Tensor | None  # [N, R, 1 + k] int64, the same of `StepTensors`' logprobs
    arrived: torch.cuda.Event | None  # None: nothing to wait for
    scores: torch.Tensor | None = None  # [R, 1 + k + M] int64, of prompts; see `scored`
    is_ahead: bool = False  # launched before the tokens of the step before were read
    observer: LogitsObserver | None = None  # that has seen the logits
    needs_edits: bool = False  # nothing is drawn before `DecodeLauncher.finish`

    @property
    def after(self) -> After:
        """Where the steps leave their requests."""
        return After(self.rows, self.begun + self.num_steps)

    @property
    def last_R(self) -> torch.Tensor:
        """Tokens [R] of the last of the steps, on the device."""
        return self.drawn[(self.first_row + self.num_steps - 1) % self.drawn.shape[0]]

    def wait(self) -> list[list[int]]:
        """Tokens of every step, row by row; waits until they are there.

        Of a step that wants no logits, zeros that nobody takes.
        """
        assert not self.needs_edits, "nothing is drawn yet"
        if self.arrived is not None:
            self.arrived.synchronize()
        if not self.tokens.shape[1]:
            return [[0] * len(self.rows)]
        return self._steps(self.tokens[:, : len(self.rows)].tolist())

    def logprobs_of_steps(self) -> list[np.ndarray] | None:
        """[S, 1 + k] of every step, when `wait` has returned; None: nobody asked for any."""
        return None if self.logprobs is None else self._steps(self.logprobs.numpy())

    def _steps(self, ring: Any) -> list[Any]:
        return [ring[(self.first_row + i) % len(ring)] for i in range(self.num_steps)]


def on_its_way(x: torch.Tensor) -> torch.Tensor:
    """A copy on the host, pinned where the device is a GPU, without waiting for it."""
    pinned = x.device.type == "cuda"
    copied = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned)
    return copied.copy_(x, non_blocking=True)


class TokenBuffers:
    """Where tokens arrive on the host.

    Every graph has two buffers in turn, as steps are launched before the last tokens are read; so
    have all steps together that are called.

    Args:
        max_rows: tokens of a called step at most.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._pairs: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        """Graphs that have buffers."""
        return len(self._pairs.keys() - {0})

    def copy(
        self, captured: CapturedStep | None, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.cuda.Event | None]:
        """Copy what steps have drawn after what is launched, without waiting.

        Returns copies of `tokens` and `logprobs`, and the event after them on a GPU.
        """
        drawn, logprobs = tensors["tokens"], tensors.get("logprobs")
        on_gpu = drawn.device.type == "cuda"
        copied = self._next(captured, drawn, on_gpu)
        copied.copy_(drawn, non_blocking=True)
        logprobs = None if logprobs is None else on_its_way(logprobs)
        if not on_gpu:
            return copied, logprobs, None
        arrived = torch.cuda.Event()
        arrived.record()
        return copied, logprobs, arrived

    def clear(self) -> None:
        """Forget the buffers of graphs that are gone."""
        self._pairs.clear()

    def _next(
        self, captured: CapturedStep | None, drawn: torch.Tensor, pinned: bool
    ) -> torch.Tensor:
        key = 0 if captured is None else id(captured)
        if key not in self._pairs:
            shape = (1, self._max_rows) if captured is None else drawn.shape
            self._pairs[key] = [
                torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
                for _ in range(2)
            ]
        pair = self._pairs[key]
        pair.reverse()
        return pair[0][:, : drawn.shape[1]]


class DecodeLauncher:
    """Launches steps: filled anew, or decodes that go on from what the last ones left.

    Args:
        runner: calls steps and replays the graphs.
        always_fills: fill the tensors before every step.
    """

    def __init__(self, runner: StepRunner, always_fills: bool) -> None:
        self.runner = runner
        self.always_fills = always_fills
        self.buffers = TokenBuffers(runner.max_batch_size)
        self._last: LaunchedSteps | None = None  # nothing was launched since, not in part either
        self._num_launched = 0  # steps since the tensors were filled

    def can_chain(self, captured: CapturedStep) -> bool:
        """Whether a step can go on from what the step before left on the device."""
        return captured.key.query_len == 1 and not (self.always_fills or captured.needs_host)

    def launch(
        self,
        captured: CapturedStep,
        rows: Rows,
        num_steps: int,
        last: LaunchedSteps | None = None,
    ) -> LaunchedSteps:
        """Launch a captured step, or `num_steps` decode steps of the rows.

        Args:
            captured: the graph.
            rows: of the batch.
            num_steps: replays of the graph.
            last: steps after which the rows were scheduled, and whose tokens they may take.
        """
        assert last is None or self.is_last(last), "its tokens are still on the device"
        self.invalidate()
        # With two graphs, but all tokens known to the host, both are launched at once.
        late = captured.key.late_edits and rows.takes_tokens
        self.runner.fill(captured.tensors, rows, captured.key.sampling, edits=not late)
        if last is not None:
            self.runner.take_tokens(captured.tensors, rows, last.last_R)
        self._num_launched = 0
        return self._replay(captured, rows, 0, num_steps, last is not None, late=late)

    def finish(self, launched: LaunchedSteps) -> LaunchedSteps:
        """Draw from launched logits whose rows the host has read the tokens of."""
        assert self.is_last(launched), "its logits are still on the device"
        assert launched.captured is not None, "called steps have all edits"
        self.invalidate()
        self.runner.finish(launched.captured, launched.rows)
        return self._drawn(launched)

    def call(
        self, rows: Rows, *, last: LaunchedSteps | None = None, **wanted: Any
    ) -> LaunchedSteps:
        """Call a step of the rows; arguments as those of `launch`, and of `StepRunner.call`."""
        assert last is None or self.is_last(last), "its tokens are still on the device"
        self.invalidate()
        observer = self.runner.on_logits
        last_R = None if last is None else last.last_R
        tensors = self.runner.call(rows, **wanted, last_R=last_R)
        scores = on_its_way(tensors["scores"]) if "scores" in tensors else None
        copied, ahead = self.buffers.copy(None, tensors), last is not None
        launched = LaunchedSteps(
            None, rows, 0, 1, 0, tensors["tokens"], *copied, scores, ahead, observer
        )
        self._last = launched
        return launched

    def is_last(self, launched: LaunchedSteps) -> bool:
        """Whether nothing was launched after these: the device still has their tokens."""
        return self._last is launched

    def may_follow(self, launched: LaunchedSteps) -> bool:
        """Whether the tensors hold what these steps leave, and the next can go on from there."""
        captured = launched.captured
        return captured is not None and self.can_chain(captured) and self.is_last(launched)

    def follow(self, launched: LaunchedSteps, num_steps: int) -> LaunchedSteps:
        """Launch the next steps of the same rows before the tokens of these are read."""
        assert self.may_follow(launched), "nothing came in between"
        assert launched.captured is not None, "called steps leave no tensors"
        begun = launched.begun + launched.num_steps
        return self._replay(launched.captured, launched.rows, begun, num_steps, True)

    def invalidate(self) -> None:
        """The device has nobody's next step, nor tokens for it: the next launch fills anew."""
        self._last = None

    def _replay(
        self,
        captured: CapturedStep,
        rows: Rows,
        begun: int,
        num_steps: int,
        is_ahead: bool,
        *,
        late: bool = False,
    ) -> LaunchedSteps:
        """If a replay is refused, those before it are dropped: the next launch fills anew."""
        self.invalidate()
        self.runner.advance_states(rows, begun + num_steps)
        drawn = captured.tensors.device["tokens"]
        first_row = self._num_launched % drawn.shape[0]
        self.runner.launch(captured, num_steps)
        if captured.key.late_edits and not late:
            self.runner.finish(captured)
        self._num_launched += num_steps
        none = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        launched = LaunchedSteps(
            captured, rows, begun, num_steps, first_row, drawn, none, None, None,
            is_ahead=is_ahead, needs_edits=late,
        )  # fmt: skip
        if not late:
            return self._drawn(launched)
        self._last = launched
        return launched

    def _drawn(self, launched: LaunchedSteps) -> LaunchedSteps:
        """With what it draws on its way to the host."""
        captured = launched.captured
        assert captured is not None, "called steps are copied by themselves"
        tokens, logprobs, arrived = self.buffers.copy(captured, captured.tensors.device)
        self._last = dataclasses.replace(
            launched, tokens=tokens, logprobs=logprobs, arrived=arrived, needs_edits=False
        )
        return self._last
