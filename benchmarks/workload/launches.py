"""How long the device takes for every launch of a session, by the kind of its step."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from graphs.launcher import DecodeLauncher, LaunchedSteps
from graphs.modes import CUDAGraphMode
from graphs.step.tensors import StepTensors

Stamp = torch.cuda.Event | float
"""A moment on the device; on a CPU a time of the host, in seconds."""


@dataclasses.dataclass
class Launch:
    """Steps that were launched together."""

    kind: str
    num_steps: int
    num_tokens: int  # of one of the steps, without padding
    num_rows: int
    is_ahead: bool
    begin: Stamp
    end: Stamp

    @property
    def ms(self) -> float:
        """On the device, from the upload to the copy of the tokens."""
        if isinstance(self.begin, float):
            assert isinstance(self.end, float), "both are times of the host"
            return 1e3 * (self.end - self.begin)
        assert not isinstance(self.end, float), "both are events"
        return self.begin.elapsed_time(self.end)


@dataclasses.dataclass
class Kind:
    """All launches of a kind."""

    kind: str
    num_launches: int = 0
    num_ahead: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    ms: float = 0.0

    @property
    def ms_per_step(self) -> float:
        return self.ms / max(1, self.num_steps)


def kind_of(launched: LaunchedSteps) -> str:
    """decode, mixed or chunks; captured, in pieces or called."""
    captured = launched.captured
    if all(s.num_tokens == 1 and s.wants_token for s in launched.rows):
        batch = "decode"
    else:
        batch = "mixed" if any(s.wants_token for s in launched.rows) else "chunks"
    if captured is None:
        return f"{batch}, called"
    return f"{batch}, {'captured' if captured.mode is CUDAGraphMode.FULL else 'in pieces'}"


@contextlib.contextmanager
def timed_launches(device: torch.device) -> Iterator[list[Launch]]:
    """Launches inside the block. Read their times after the device is done."""
    found: list[Launch] = []
    begins: list[Stamp] = []  # of the launches that are being made

    def stamp() -> Stamp:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(original: Callable[..., LaunchedSteps]) -> Callable[..., LaunchedSteps]:
        @functools.wraps(original)
        def launch(self: DecodeLauncher, *arguments: Any, **keywords: Any) -> LaunchedSteps:
            begins.append(stamp())
            try:
                launched = original(self, *arguments, **keywords)
            finally:
                begin = begins.pop()
            num_tokens = sum(s.num_tokens for s in launched.rows)
            found.append(
                Launch(
                    kind_of(launched), launched.num_steps, num_tokens, len(launched.rows),
                    launched.is_ahead, begin, stamp(),
                )
            )  # fmt: skip
            return launched

        return launch

    upload = StepTensors.upload

    def uploading(self: StepTensors, *, edits: bool = True) -> None:
        """What the host did before is none of the device's time, though the device may be idle."""
        if begins:
            begins[-1] = stamp()
        upload(self, edits=edits)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(StepTensors, "upload", uploading))
        for name in ("launch", "call", "follow"):
            replaced = timed(getattr(DecodeLauncher, name))
            stack.enter_context(mock.patch.object(DecodeLauncher, name, replaced))
        yield found


def by_kind(launches: list[Launch]) -> list[Kind]:
    """Sums, the kind that takes longest first."""
    kinds: dict[str, Kind] = {}
    for launch in launches:
        kind = kinds.setdefault(launch.kind, Kind(launch.kind))
        kind.num_launches += 1
        kind.num_ahead += launch.is_ahead
        kind.num_steps += launch.num_steps
        kind.num_tokens += launch.num_tokens * launch.num_steps
        kind.ms += launch.ms
    return sorted(kinds.values(), key=lambda kind: -kind.ms)
