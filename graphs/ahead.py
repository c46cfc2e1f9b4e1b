"""Launch ahead: the device runs decode steps while the host does something else.

States of launched steps, and who moves them. `StepLoop.step` may be interrupted at any line; the
next call goes on from what the last column says.

=========  ==========================  ===========================  ============================
state      meaning                     moved by, to                 an interrupt leaves
=========  ==========================  ===========================  ============================
none       no steps are launched       `DecodeLauncher.launch`,     none; replays that run
                                       to launched                  already are dropped
launched   the loop holds them, their  `DecodeLauncher.follow`,     launched
           tokens are not read; the    to followed; `StepLoop`,
           tensors hold what they      to collected, or to dropped
           leave                       as the model has changed
followed   the next steps of the same  `TokenStream.collect`, to    launched; the next steps are
           requests are launched too;  collected                    dropped, nothing follows
           the tensors hold what
           those leave
collected  the token stream has their  `StepLoop`: to none, or to   launched; no token is taken
           tokens                      launched for the next steps  twice; the next steps are
                                                                    dropped
dropped    their tokens count for      `DecodeLauncher.launch`,     dropped
           nothing                     which fills the tensors
                                       anew and draws the same
                                       tokens, to launched
=========  ==========================  ===========================  ============================

`DecodeLauncher.invalidate` says that the tensors hold nobody's next step. Every other use of the
tensors calls it first, and so does every launch until it is complete.
"""

import dataclasses
from collections.abc import Sequence

import torch

from graphs.capture.graphs import CapturedStep
from graphs.capture.plan import CapturePlan
from graphs.modes import CUDAGraphMode
from graphs.requests.requests import Request
from graphs.requests.scheduler import Scheduled
from graphs.runner import StepRunner


@dataclasses.dataclass
class LaunchedSteps:
    """Replays of one decode graph that were launched together, and where their tokens arrive."""

    captured: CapturedStep
    requests: list[Request]  # a row of the batch each
    num_known: list[int]  # generated tokens of each before the first of these steps
    num_steps: int
    first_row: int  # of the ring of tokens: the row of the first step
    tokens: torch.Tensor  # [N, S] int64, a copy of the ring; pinned where the device is a GPU
    arrived: torch.cuda.Event | None  # None: nothing to wait for

    def wait(self) -> list[list[int]]:
        """Tokens of every step, request by request; waits until they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ring = self.tokens[:, : len(self.requests)].tolist()
        return [ring[(self.first_row + i) % len(ring)] for i in range(self.num_steps)]


class TokenBuffers:
    """Where tokens arrive on the host.

    Every graph has two buffers in turn, as steps are launched before the last tokens are read.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        """Graphs that have buffers."""
        return len(self._pairs)

    def copy(self, captured: CapturedStep) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy the graph's ring of tokens after what is launched, without waiting.

        Returns the copy, and the event after it on a GPU.
        """
        ring = captured.tensors.device["tokens"]
        on_gpu = ring.device.type == "cuda"
        if id(captured) not in self._pairs:
            self._pairs[id(captured)] = [
                torch.empty(ring.shape, dtype=ring.dtype, device="cpu", pin_memory=on_gpu)
                for _ in range(2)
            ]
        pair = self._pairs[id(captured)]
        pair.reverse()
        pair[0].copy_(ring, non_blocking=True)
        if not on_gpu:
            return pair[0], None
        arrived = torch.cuda.Event()
        arrived.record()
        return pair[0], arrived

    def clear(self) -> None:
        """Forget the buffers of graphs that are gone."""
        self._pairs.clear()


@dataclasses.dataclass(frozen=True)
class DecodeSteps:
    """Decode steps that run without the host."""

    asked: int
    used: int | None  # None: known when the first decode step has been captured
    why: str


class DecodeLauncher:
    """Launches decode steps: fills a graph's tensors, or goes on from what the last steps left.

    Args:
        runner: replays the graphs.
        always_fills: fill the tensors before every step.
    """

    def __init__(self, runner: StepRunner, always_fills: bool) -> None:
        self.runner = runner
        self.always_fills = always_fills
        self.buffers = TokenBuffers()
        self._resident: LaunchedSteps | None = None  # the tensors hold what these leave
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
        self, captured: CapturedStep, scheduled: Sequence[Scheduled], num_steps: int
    ) -> LaunchedSteps:
        """Launch `num_steps` decode steps of the requests."""
        self.invalidate()
        self.runner.fill(captured.tensors, scheduled, captured.key.sampling)
        self._num_launched = 0
        requests = [s.request for s in scheduled]
        known = [len(request.token_ids) for request in requests]
        return self._replay(captured, requests, known, num_steps)

    def may_follow(self, launched: LaunchedSteps) -> bool:
        """Whether the tensors hold what these steps leave, and the next can go on from there."""
        return self.can_chain(launched.captured) and self._resident is launched

    def follow(self, launched: LaunchedSteps, num_steps: int) -> LaunchedSteps:
        """Launch the next steps of the same requests before the tokens of these are read."""
        assert self.may_follow(launched), "nothing came in between"
        known = [number + launched.num_steps for number in launched.num_known]
        return self._replay(launched.captured, launched.requests, known, num_steps)

    def invalidate(self) -> None:
        """The tensors hold nobody's next step: the next launch fills them."""
        self._resident = None

    def _replay(
        self, captured: CapturedStep, requests: list[Request], known: list[int], num_steps: int
    ) -> LaunchedSteps:
        """If a replay is refused, those before it are dropped: the next launch fills anew."""
        self.invalidate()
        first_row = self._num_launched % captured.tensors.device["tokens"].shape[0]
        for i in range(num_steps):
            self.runner.launch(captured, weights=i == 0)
        self._num_launched += num_steps
        tokens, arrived = self.buffers.copy(captured)
        launched = LaunchedSteps(captured, requests, known, num_steps, first_row, tokens, arrived)
        self._resident = launched
        return launched
