"""When a captured step with prompts is faster than calling it: padding against launch time.

A replay computes the padding too, a call waits for the host. Which one is faster depends on the
model, the GPU and the host, so both are timed when such a step is captured. Where a replay is
faster than a call of one token, smaller ones are not timed: they are taken to be faster still.
"""

import dataclasses
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from graphs.capture.recorder import Builder, metadata_now
from graphs.capture.store import CapturedStep, StepGraphs
from graphs.modes import BatchDescriptor

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of a run on the device, from an idle one on: launches that are late count."""

ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Gain:
    """A captured step with prompts beside calls of the steps that it may hold."""

    num_tokens: int  # of the graph
    low: int  # tokens of the smallest step that no smaller graph holds
    replay_ms: float
    call_low_ms: float  # a call of `low` tokens; infinite: calls find no memory
    call_ms: float  # a call of `num_tokens`

    @property
    def least(self) -> int | None:
        """The fewest tokens for which the replay is as fast as a call; None: it never is.

        The time of calls in between is taken to grow evenly.
        """
        if self.call_low_ms >= self.replay_ms:
            return self.low
        if self.call_ms < self.replay_ms:
            return None
        part = (self.replay_ms - self.call_low_ms) / (self.call_ms - self.call_low_ms)
        return min(self.num_tokens, self.low + int(part * (self.num_tokens - self.low)) + 1)

    def __str__(self) -> str:
        used = "never used" if self.least is None else f"used from {self.least} tokens on"
        times = f"{self.call_low_ms:.2f} to {self.call_ms:.2f} ms"
        if math.isinf(self.call_ms):
            times = "find no memory"
        return (
            f"mixed {self.num_tokens}: replay {self.replay_ms:.2f} ms, calls of {self.low} to "
            f"{self.num_tokens} tokens {times}; {used}"
        )


class MixedGains:
    """What was timed, and which steps are replayed.

    Args:
        sizes: tokens of the captured steps.
        builder: plans the calls.
        timer: None: nothing is timed, and everything captured is used.
    """

    def __init__(self, sizes: list[int], builder: Builder, timer: Timer | None) -> None:
        self.timer = timer
        self._sizes, self._builder = sizes, builder
        self._found: dict[tuple[int, bool], Gain] = {}
        self._pay = 0  # tokens up to which replays are faster than any call

    def __iter__(self) -> Iterator[Gain]:
        """Gains of steps that want logits, the smallest first."""
        return iter([g for (_, logits), g in sorted(self._found.items()) if logits])

    def pays(self, key: BatchDescriptor, num_tokens: int) -> bool:
        """Whether a step of so many tokens is replayed under a key that holds it."""
        gain = self._found.get((key.num_tokens, key.logits))
        return key.uniform or gain is None or num_tokens >= (gain.least or key.num_tokens + 1)

    def measure(self, captured: CapturedStep, graphs: StepGraphs) -> None:
        """Time a graph when it is new; sampling does not change what pays."""
        key = captured.key
        place = key.num_tokens, key.logits
        known = place in self._found or key.num_tokens <= self._pay
        if self.timer is None or key.uniform or known:
            return
        smaller = self._sizes[: bisect_left(self._sizes, key.num_tokens)]
        low = smaller[-1] + 1 if smaller else 1
        replay_ms = self.timer(lambda: replay(captured))
        try:
            sizes = low, key.num_tokens, 1
            *calls, least = [self.timer(self._call(graphs, key, size)) for size in sizes]
        except torch.OutOfMemoryError:  # a replay has its memory already
            *calls, least = math.inf, math.inf, 0.0
        self._found[place] = Gain(key.num_tokens, low, replay_ms, *calls)
        if key.logits and replay_ms < least:
            self._pay = key.num_tokens

    def clear(self) -> None:
        """The graphs are gone, perhaps because the model has changed."""
        self._found, self._pay = {}, 0

    def _call(
        self, graphs: StepGraphs, key: BatchDescriptor, num_tokens: int
    ) -> Callable[[], object]:
        """A step of padding, called as a step of the session would be."""
        num_reqs = min(key.num_reqs, num_tokens)
        step = graphs.make_step(dataclasses.replace(key, num_tokens=num_tokens, num_reqs=num_reqs))
        step.tensors.upload()
        return lambda: step.run(metadata_now(self._builder, step.tensors))


def replay(captured: CapturedStep) -> None:
    """Of padding, which the tensors hold after the capture."""
    graph = captured.graph
    graph.replay(None if graph.plan is None else graph.plan())


def gpu_ms(run: Callable[[], object]) -> float:
    """Median milliseconds of `run` on an idle GPU, after one that is not timed."""
    run()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
