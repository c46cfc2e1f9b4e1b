"""Decode steps that the device runs while the host does something else."""

import dataclasses
from collections.abc import Sequence

import torch

from graphs.capture.graphs import CapturedStep
from graphs.requests.requests import Request
from graphs.requests.scheduler import Scheduled
from graphs.runner import StepRunner


@dataclasses.dataclass
class Flight:
    """Replays of one decode graph that were launched together, and where their tokens arrive."""

    captured: CapturedStep
    requests: list[Request]  # a row of the batch each
    num_known: list[int]  # generated tokens of each when the flight began
    num_steps: int
    first_row: int  # of the ring of tokens, where the first step's stand
    tokens: torch.Tensor  # [N, S] int64, the ring's copy, pinned where the device is a GPU
    arrived: torch.cuda.Event | None  # None: nothing to wait for

    def wait(self) -> list[list[int]]:
        """Tokens of every step, request by request; waits until they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ring = self.tokens[:, : len(self.requests)].tolist()
        return [ring[(self.first_row + i) % len(ring)] for i in range(self.num_steps)]


class Mailbox:
    """Where tokens arrive: two buffers a graph in turn, as one flight starts before the last is
    read.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, list[torch.Tensor]] = {}

    def fetch(
        self,
        captured: CapturedStep,
        requests: list[Request],
        num_known: list[int],
        num_steps: int,
        first_row: int,
    ) -> Flight:
        """Copy the ring behind the replays that were launched, without waiting for them."""
        ring = captured.tensors.device["tokens"]
        on_gpu = ring.device.type == "cuda"
        if id(captured) not in self._buffers:
            self._buffers[id(captured)] = [
                torch.empty(ring.shape, dtype=ring.dtype, device="cpu", pin_memory=on_gpu)
                for _ in range(2)
            ]
        buffers = self._buffers[id(captured)]
        buffers.reverse()
        buffers[0].copy_(ring, non_blocking=True)
        arrived = None
        if on_gpu:
            arrived = torch.cuda.Event()
            arrived.record()
        return Flight(captured, requests, num_known, num_steps, first_row, buffers[0], arrived)

    def clear(self) -> None:
        """Forget the buffers of graphs that are gone."""
        self._buffers.clear()


class Pilot:
    """Launches decode steps: fills a graph's tensors, or goes on from what a flight leaves there.

    Args:
        always_fills: fill them before every step.
    """

    def __init__(self, runner: StepRunner, always_fills: bool) -> None:
        self.runner = runner
        self.always_fills = always_fills
        self.mailbox = Mailbox()
        self._resident: Flight | None = None  # what the tensors hold is what this one leaves
        self._num_launched = 0  # steps since the tensors were filled

    def may_stay(self, captured: CapturedStep) -> bool:
        """Whether a step may follow on what the last one left on the device."""
        return not (self.always_fills or captured.needs_host)

    def launch(
        self, captured: CapturedStep, scheduled: Sequence[Scheduled], num_steps: int
    ) -> Flight:
        """Start `num_steps` decode steps of the requests."""
        self.land()
        self.runner.fill(captured.tensors, scheduled, captured.key.sampling)
        self._num_launched = 0
        requests = [s.request for s in scheduled]
        known = [len(request.token_ids) for request in requests]
        return self._launched(captured, requests, known, num_steps)

    def may_follow(self, flight: Flight) -> bool:
        """Whether the tensors hold what this flight leaves there, and no other."""
        return self.may_stay(flight.captured) and self._resident is flight

    def follow(self, flight: Flight, num_steps: int) -> Flight:
        """Start the next steps of a flight's requests before its tokens are read."""
        assert self.may_follow(flight), "nothing came in between"
        known = [number + flight.num_steps for number in flight.num_known]
        return self._launched(flight.captured, flight.requests, known, num_steps)

    def _launched(
        self, captured: CapturedStep, requests: list[Request], known: list[int], num_steps: int
    ) -> Flight:
        """If a replay is refused, those before it count for nothing: the next launch fills anew."""
        self.land()
        first_row = self._num_launched % captured.tensors.device["tokens"].shape[0]
        for i in range(num_steps):
            self.runner.launch(captured, weights=i == 0)
        self._num_launched += num_steps
        flight = self.mailbox.fetch(captured, requests, known, num_steps, first_row)
        self._resident = flight
        return flight

    def land(self) -> None:
        """What is in the tensors is not the next step's: fill them anew."""
        self._resident = None
