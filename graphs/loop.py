"""Steps of a session, one behind the other: what runs next, in which graph, and what follows it.

Scheduler.next_step -> StepTensors.fill, upload -> model, sampling -> Intake
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch._dynamo.utils import counters

from graphs.ahead import Flight, Pilot
from graphs.capture.graphs import CapturedStep, StepGraphs
from graphs.capture.plan import CapturePlan
from graphs.context import exclusive, in_surroundings
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.requests.requests import Request
from graphs.requests.scheduler import Scheduled, Scheduler
from graphs.requests.stream import Intake
from graphs.runner import StepRunner
from graphs.sampling.params import Sampling
from graphs.verify.model_state import ModelState


class CompileCounters:
    """Graphs, breaks and recompilations of one session.

    Attributes:
        num_graphs: graphs that Dynamo made until `warm()`.
        num_breaks: graph breaks in all.
        num_recompiles: graphs that Dynamo made after `warm()`.
    """

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_breaks = 0
        self.num_recompiles = 0
        self._warm = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        graphs, breaks = _graphs(), _breaks()
        try:
            yield
        finally:
            if self._warm:
                self.num_recompiles += _graphs() - graphs
            else:
                self.num_graphs += _graphs() - graphs
            self.num_breaks += _breaks() - breaks

    def warm(self) -> None:
        """From here on every new graph is a recompilation."""
        self._warm = True


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _breaks() -> int:
    return sum(counters["graph_break"].values())


class StepLoop:
    """The part of a `DecodeSession` that runs steps.

    Attributes:
        num_steps: steps that were replayed ("captured") and called.
    """

    device: torch.device
    decode_steps: int
    plan: CapturePlan
    runner: StepRunner
    state: ModelState
    _requests: dict[int, Request]

    def _start_loop(self, scheduler: Scheduler, always_fills: bool) -> None:
        self.lock = threading.RLock()
        self.scheduler = scheduler
        self.intake = Intake(scheduler)
        self.pilot = Pilot(self.runner, always_fills)
        self.counters = CompileCounters()
        self.num_steps = {"captured": 0, "called": 0}
        self._flight: Flight | None = None
        self._looked = False  # at the model, in this step
        self._looks_late = False  # in the next one

    @property
    def _replays_only(self) -> bool:
        """Whether replays run none of the model's Python."""
        return self.plan.debug is None and not self.pilot.always_fills

    @property
    def graphs(self) -> StepGraphs | None:
        """`StepGraphs`; None where nothing is captured."""
        return self.runner.graphs

    def _warm_up(self) -> None:
        """Whatever must come before the first step."""
        raise NotImplementedError

    @in_surroundings
    def _advance(self) -> None:
        """A step, whose tokens the intake takes. It may be interrupted and done again anywhere.

        A flight stays until all of its tokens are taken. What was launched behind it counts only
        once it has taken its place; the pilot goes on from no other flight.
        """
        self._looked = False
        if not self._looks_late:
            self._look_at_model()
        self._warm_up()
        if self._flight is None:
            step = self.scheduler.next_step()
            if not step:
                return
            captured = self._captured(step)
            if captured is None or captured.key.query_len != 1:
                self._run_alone(step, captured)
                return
            num_steps = self._num_steps(captured, [s.request for s in step])
            self._flight = self.pilot.launch(captured, step, num_steps)
        followed = self._followed(self._flight)  # refused: the flight is still there to be landed
        if not self._looked and self._look_behind(self._flight):
            return
        self._looks_late = self._flight.captured.needs_host and self._replays_only
        self._land(self._flight)
        self._flight = followed

    def _look_at_model(self) -> None:
        """Refuse a model that has changed, or drop its graphs, before anything is launched.

        The device computes meanwhile what was launched before.
        """
        if self.state.check() and self.graphs is not None:
            self._settle()
            self.pilot.mailbox.clear()
            self.runner.release()
        self.state.stale = False
        self._looked = True

    def _look_behind(self, flight: Flight) -> bool:
        """The same behind a replay; whether it counts for nothing, as the model has changed.

        Where the host plans every replay, the device has nothing to do while the host looks first:
        0.4 of 5.5 ms a step of PIECEWISE at batch 1 (one H200, 2026-11-22).
        """
        changed = True
        try:
            changed = self.state.check()
        finally:
            if changed:
                flight.wait()
                self.pilot.land()
                self._flight, self._looks_late = None, False
        if changed:
            self.pilot.mailbox.clear()
            self.runner.release()
            self.state.stale = False
        return changed

    @exclusive
    def _advance_alone(self) -> None:
        self._advance()

    def _finish(self, requests: Sequence[Request], progress: Callable[[int], object]) -> None:
        """Steps until the requests have ended; `progress` is told how many have in each."""
        going = list(requests)
        while going:
            self._advance_alone()
            still = [r for r in going if not r.finish_reason]
            progress(len(going) - len(still))
            going = still

    @in_surroundings
    def _advance_drafted(self, drafts: Mapping[int, list[int]]) -> None:
        """A step with drafts, or without where a prompt comes first or the budget is too small."""
        k = self.plan.num_draft_tokens
        self._look_at_model()
        self._warm_up()
        self._settle()
        step = self.scheduler.next_step()
        room = self.scheduler.max_tokens_per_step // (1 + k)
        if not room or not step or not all(s.num_tokens == 1 and s.wants_token for s in step):
            self._advance()
            return
        drafted = []
        for s in step[:room]:
            known = () if s.request.id in self.intake else drafts.get(s.request.id, ())
            draft = (*known, *[0] * (k - len(known)))
            drafted.append(dataclasses.replace(s, num_tokens=1 + k, draft=draft))
        self._run_alone(drafted, self._captured(drafted))

    def _captured(self, step: list[Scheduled]) -> CapturedStep | None:
        """The graph that holds the step, captured if need be; None: it is called."""
        if self.graphs is None:
            return None
        rows = 1 + len(step[0].draft)  # of each, where only decodes are in the step
        uniform = all(s.num_tokens == rows and s.wants_token for s in step)
        mode, key = self.plan.dispatcher.dispatch(
            sum(s.num_tokens for s in step),
            len(step),
            rows if uniform else None,
            self._kind(step),
            logits=self._wants_logits(step),
        )
        if key is None or (rows > 1 and not key.uniform):  # mixed keys have logits of last rows
            return None
        return self._capture(key, mode)

    def _capture(self, key: BatchDescriptor, mode: CUDAGraphMode) -> CapturedStep | None:
        if not self._looked and not self.runner.is_captured(key):
            self._look_at_model()
        with self.counters.watching():
            return self.runner.captured(key, mode)

    def _run_alone(self, step: list[Scheduled], captured: CapturedStep | None) -> None:
        """A step that ends with its tokens on the host."""
        if not self._looked:
            self._look_at_model()
            captured = self._captured(step)  # dropped, if the model has changed
        self._looks_late = False
        self.pilot.land()
        if captured is None:
            self.intake.take(step, self._call(step))
            return
        self.runner.fill(captured.tensors, step, captured.key.sampling)
        self.runner.launch(captured)
        self.num_steps["captured"] += 1
        tokens = captured.tensors.device["tokens"][0].tolist()
        rows = len(step[0].draft) + 1
        self.intake.take(step, [tokens[i * rows : (i + 1) * rows] for i in range(len(step))])

    def _call(self, step: list[Scheduled]) -> list[list[int]]:
        self.num_steps["called"] += 1
        with self.counters.watching():
            return self.runner.call(step, self._kind(step), logits=self._wants_logits(step))

    def _wants_logits(self, step: Sequence[Scheduled]) -> bool:
        """Whether any are computed: not of chunks of prompts, if the model then does less."""
        return not self.runner.drops_rows or any(s.wants_token for s in step)

    def _kind(self, step: Sequence[Scheduled]) -> Sampling:
        if not self._wants_logits(step):
            return Sampling.GREEDY
        return max(s.request.sampling.kind for s in step)

    def _num_steps(
        self, captured: CapturedStep, requests: Sequence[Request], begun: int = 0
    ) -> int:
        """Steps to launch: no more than the longest of the requests still needs."""
        if not self.pilot.may_stay(captured):
            return 1
        return min(self.decode_steps, max(r.remaining - begun for r in requests))

    def _followed(self, flight: Flight) -> Flight | None:
        """The next flight of the same requests, launched before the tokens of this one are read.

        None where the batch changes: a request ends, or another one can run.
        """
        going = all(r.remaining > flight.num_steps for r in flight.requests)
        same = flight.requests == self.scheduler.running and not self.scheduler.can_admit
        captured = flight.captured
        if not (going and same and self.pilot.may_follow(flight)):
            return None
        num_steps = self._num_steps(captured, flight.requests, flight.num_steps)
        return self.pilot.follow(flight, num_steps)

    def _land(self, flight: Flight) -> None:
        self.intake.land(flight, self._requests)
        self.num_steps["captured"] += flight.num_steps

    def _settle(self) -> None:
        """Take what is in the air, and let nothing follow."""
        self.pilot.land()
        if self._flight is not None:
            self._land(self._flight)
            self._flight = None
