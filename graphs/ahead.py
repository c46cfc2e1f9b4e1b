"""Launch ahead: the device runs steps while the host reads the tokens of the ones before.

The host schedules by lengths, which it knows before the tokens. A row whose last token is not read
takes it from the steps before on the device (`graphs.step.finish`). A request that ends by its
length takes no part in the next steps. One that ends by a stop token does, as the host finds that
later: its token is dropped then, and its blocks are given back. Whatever writes to those blocks is
launched after that step.

States of launched steps, and who moves them. `StepLoop.step` may be interrupted at any line; the
next call goes on from what the last column says.

=========  ==========================  ===========================  ============================
state      meaning                     moved by, to                 an interrupt leaves
=========  ==========================  ===========================  ============================
none       no steps are launched       `DecodeLauncher.launch`,     none; steps that run
                                       `call`, to launched          already are dropped
launched   the loop holds them, their  `follow`, `launch`, `call`,  launched; if a launch after
           tokens are not read; they   to followed; `StepLoop`, to  them has begun, nothing
           are the launcher's last     collected, or to dropped as  follows before their tokens
                                       the model has changed, or    are read
                                       an observer has come
followed   the next steps are          `TokenStream.collect`, to    launched; the next steps are
           launched too and are the    collected                    dropped, nothing follows
           launcher's last
collected  the token stream has their  `StepLoop`: to none, or to   launched; no token is taken
           tokens                      launched for the next steps  twice; the next steps are
                                                                    dropped
dropped    their tokens count for      `launch`, `call`, which      dropped
           nothing                     fill anew from what the
                                       host knows and draw the
                                       same tokens, to launched
=========  ==========================  ===========================  ============================

Scheduling after launched steps changes what a step may change at any time: who runs, and who owns
blocks. Of launched steps it only reads lengths (`After`), which are the same before their tokens
are read, in between and after. `DecodeLauncher.invalidate` says that nothing is the last launch:
the device may have overwritten tokens that a next step would take. Every other use of a graph's
tensors calls it first, and so does every launch until it is complete.

These wait for the tokens first: drafts, `verify`, an observer of logits, penalties in a batch that
changes, plans that are part of a graph (`CapturedStep.plans_in_place`) or share memory
(`plans_in_turn` of a builder), and everything on a CPU, where a step is over when it is launched.
"""

import dataclasses

import torch

from graphs.capture.plan import CapturePlan
from graphs.capture.store import CapturedStep
from graphs.modes import CUDAGraphMode
from graphs.requests.batch import After, Rows
from graphs.runner import LogitsObserver, StepRunner
from graphs.sampling.params import Sampling


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
    arrived: torch.cuda.Event | None  # None: nothing to wait for
    is_ahead: bool = False  # launched before the tokens of the step before were read
    observer: LogitsObserver | None = None  # that has seen the logits

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
        if self.arrived is not None:
            self.arrived.synchronize()
        if not self.tokens.shape[1]:
            return [[0] * len(self.rows)]
        ring = self.tokens[:, : len(self.rows)].tolist()
        return [ring[(self.first_row + i) % len(ring)] for i in range(self.num_steps)]


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
        self, captured: CapturedStep | None, drawn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy drawn tokens [N, R] after what is launched, without waiting.

        Returns the copy, and the event after it on a GPU.
        """
        on_gpu = drawn.device.type == "cuda"
        copied = self._next(captured, drawn, on_gpu)
        copied.copy_(drawn, non_blocking=True)
        if not on_gpu:
            return copied, None
        arrived = torch.cuda.Event()
        arrived.record()
        return copied, arrived

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


@dataclasses.dataclass(frozen=True)
class DecodeSteps:
    """Decode steps that run without the host."""

    asked: int
    used: int | None  # None: known when the first decode step has been captured
    why: str


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
        return not (self.always_fills or captured.needs_host)

    def chained(self, plan: CapturePlan) -> DecodeSteps:
        """How many decode steps run in a row without the host: what `can_chain` says of graphs."""
        asked, graphs = self.runner.num_steps, self.runner.graphs
        if asked == 1:
            return DecodeSteps(1, 1, "asked for")
        if graphs is None:
            return DecodeSteps(asked, 1, f"no decode step is captured: {plan.why}")
        if self.always_fills:
            return DecodeSteps(asked, 1, "verify compares single steps")
        keys = [k for k in plan.dispatcher.keys(CUDAGraphMode.FULL) if k.query_len == 1]
        if not keys:
            return DecodeSteps(asked, 1, "attention between graphs is planned by the host")
        failed = [key for key in keys if key in graphs.failures]
        if failed == keys:
            return DecodeSteps(asked, 1, "no decode step could be captured")
        decodes = [captured for captured in graphs if captured.key.query_len == 1]
        planned = [captured for captured in decodes if not self.can_chain(captured)]
        if planned:
            which = f" of {len(planned)} of {len(decodes)} graphs" if planned != decodes else ""
            name = self.runner.builder.backend.name
            return DecodeSteps(asked, 1, f"{name} plans every replay{which} on the host")
        but = [f"1 for {key.in_words()}, whose capture failed" for key in failed]
        largest = max(plan.decode_sizes)
        if largest < self.runner.max_batch_size:
            but.append(f"1 for more than {largest} requests")
        if not decodes:
            why = "no decode step has been captured yet"
            return DecodeSteps(asked, None, "; ".join([why, *but]))
        return DecodeSteps(asked, asked, "; ".join(["no decode graph needs the host", *but]))

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
        self.runner.fill(captured.tensors, rows, captured.key.sampling)
        if last is not None:
            self.runner.take_tokens(captured.tensors, rows, last.last_R)
        self._num_launched = 0
        return self._replay(captured, rows, 0, num_steps, last is not None)

    def call(
        self,
        rows: Rows,
        kind: Sampling,
        *,
        logits: bool,
        last: LaunchedSteps | None = None,
    ) -> LaunchedSteps:
        """Call a step of the rows; arguments as those of `launch`, and of `StepRunner.call`."""
        assert last is None or self.is_last(last), "its tokens are still on the device"
        self.invalidate()
        observer = self.runner.on_logits
        last_R = None if last is None else last.last_R
        drawn = self.runner.call(rows, kind, logits=logits, last_R=last_R).unsqueeze(0)
        tokens, arrived = self.buffers.copy(None, drawn)
        ahead = last is not None
        launched = LaunchedSteps(
            None, rows, 0, 1, 0, drawn, tokens, arrived, is_ahead=ahead, observer=observer
        )
        self._last = launched
        return launched

    def is_last(self, launched: LaunchedSteps) -> bool:
        """Whether nothing was launched after these: the device still has their tokens."""
        return self._last is launched

    def may_follow(self, launched: LaunchedSteps) -> bool:
        """Whether the tensors hold what these steps leave, and the next can go on from there."""
        captured = launched.captured
        if captured is None or captured.key.query_len != 1:
            return False
        return self.can_chain(captured) and self.is_last(launched)

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
    ) -> LaunchedSteps:
        """If a replay is refused, those before it are dropped: the next launch fills anew."""
        self.invalidate()
        drawn = captured.tensors.device["tokens"]
        first_row = self._num_launched % drawn.shape[0]
        for i in range(num_steps):
            self.runner.launch(captured, weights=i == 0)
        self._num_launched += num_steps
        tokens, arrived = self.buffers.copy(captured, drawn)
        launched = LaunchedSteps(
            captured, rows, begun, num_steps, first_row, drawn, tokens, arrived, is_ahead=is_ahead
        )
        self._last = launched
        return launched
