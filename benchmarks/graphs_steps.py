"""What one session's decode steps cost: replays alone, steps with the host, captures, checks."""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from graphs import BatchDescriptor, DecodeSession
from graphs.capture.store import CapturedStep
from graphs.launcher import LaunchedSteps


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long requests are, and how many tokens a figure is made of."""

    context: int  # tokens of a request in the cache, in the middle of what is timed
    warm: int = 16  # tokens before the timed ones
    timed: int = 64
    repeats: int = 16  # replays in a row
    rounds: int = 4  # of them

    def __post_init__(self) -> None:
        if self.prompt < 1:
            raise ValueError(
                f"context must be more than {self.context - self.prompt} tokens, as many stand "
                f"before the middle of what is timed, got {self.context}"
            )

    @property
    def prompt(self) -> int:
        return self.context - self.warm - self.timed // 2

    def new_tokens(self, decode_steps: int) -> int:
        """Behind the timed tokens requests go on, so that nothing ends among those."""
        return self.warm + self.timed + 2 * decode_steps

    def longest(self, decode_steps: int) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.new_tokens(decode_steps)


@dataclasses.dataclass
class Row:
    """One mode and batch; milliseconds a token, which is a step of the device."""

    mode: str
    batch: int
    decode_steps: int
    replay_ms: float  # graphs alone, one behind the other
    wall_ms: float  # through `DecodeSession.step`
    host_us: float  # of the wall time, without what the host spent waiting for tokens
    floor_ms: float | None = None

    @property
    def gap_us(self) -> float:
        """Between replays, as far as the device has nothing to do."""
        return 1000 * (self.wall_ms - self.replay_ms)

    @property
    def over_replay(self) -> float:
        return self.wall_ms / self.replay_ms

    @property
    def over_floor(self) -> float | None:
        return self.replay_ms / self.floor_ms if self.floor_ms else None

    @property
    def busy(self) -> float:
        """Share of the wall time in which the host works."""
        return self.host_us / 1000 / self.wall_ms


@dataclasses.dataclass(frozen=True)
class Captures:
    """All graphs of one session."""

    mode: str
    decode_steps: int
    num_graphs: int
    compile_seconds: float
    num_compiled: int  # graphs that Dynamo made: 0 where an earlier session's were used
    seconds: float  # the wall time of all captures; kernels that no graph had yet are compiled
    pool_bytes: int  # by which PyTorch's memory grew
    device_bytes: int | None  # by which the device's did, the driver's part included


@dataclasses.dataclass
class Waits:
    """Time that the host has spent waiting for tokens."""

    seconds: float = 0.0


@contextlib.contextmanager
def watched_waits() -> Iterator[Waits]:
    """Waits for launched steps inside the block, timed from outside of `graphs`."""
    waits, original = Waits(), LaunchedSteps.wait

    def wait(launched: LaunchedSteps) -> list[list[int]]:
        if launched.arrived is not None:
            begin = time.perf_counter()
            launched.arrived.synchronize()
            waits.seconds += time.perf_counter() - begin
        return original(launched)

    with mock.patch.object(LaunchedSteps, "wait", wait):
        yield waits


@torch.no_grad()
def measure_case(session: DecodeSession, batch: int, lengths: Lengths) -> Row:
    """Steps of `batch` requests, then replays of their graph at the same lengths."""
    wall_ms, host_us = step_times(session, batch, lengths)
    mode = session.graph_mode.decode_mode()
    captured = session.graphs.get(BatchDescriptor(batch, batch, uniform=True), mode)
    assert captured is not None, "failures raise"
    replayed = replay_ms(session, captured, lengths)
    return Row(session.graph_mode.name, batch, session.decode_steps, replayed, wall_ms, host_us)


def step_times(session: DecodeSession, batch: int, lengths: Lengths) -> tuple[float, float]:
    """Wall milliseconds and host microseconds a token."""
    num_steps = session.decode_steps
    prompt = [i % session.vocab_size for i in range(lengths.prompt)]
    ids = [session.add(prompt, lengths.new_tokens(num_steps), eos=()) for _ in range(batch)]
    for request in session.scheduler.waiting:
        request.num_computed = len(prompt) - 1  # whatever the cache holds stands for the prompt
    for _ in range(lengths.warm // num_steps):
        session.step()
    num_calls, num_tokens = lengths.timed // num_steps, 0
    called = session.num_steps["called"]
    with watched_waits() as waits:
        begin = time.perf_counter()
        for _ in range(num_calls):
            num_tokens += len(session.step())
        seconds = time.perf_counter() - begin
    assert session.num_steps["called"] == called, "every step is a replay"
    assert num_tokens == num_calls * num_steps * batch, "every call gives all tokens"
    while session.num_unfinished:
        session.step()
    for request_id in ids:
        session.discard(request_id)
    steps = num_calls * num_steps
    return 1e3 * seconds / steps, 1e6 * (seconds - waits.seconds) / steps


def replay_ms(session: DecodeSession, captured: CapturedStep, lengths: Lengths) -> float:
    """Median over rounds of replays one behind the other, nothing else between them.

    The graph's tensors still hold the last requests, and their blocks. Where the graph plans for
    itself, they grow as in a session, around `context`; what the host has planned stays as it is.
    """
    graph, grows = captured.graph, not captured.needs_host
    first = lengths.context - (lengths.repeats // 2 if grows else 0)
    place(captured, first, session.cache.block_size, grows)
    session.runner.launch(captured)
    metadata = None if graph.plan is None else graph.plan()
    replay = functools.partial(graph.replay, metadata)
    times = []
    for _ in range(lengths.rounds):
        place(captured, first, session.cache.block_size, grows)
        times.append(interval_ms(replay, lengths.repeats, session.device))
    session.loop.launcher.invalidate()  # the tensors hold no step of the session's
    return statistics.median(times)


def place(captured: CapturedStep, context: int, block_size: int, grows: bool) -> None:
    """Set the requests that a graph's tensors hold to `context` tokens; as many as its rows."""
    if captured.tensors.device_bytes.device.type == "cuda":
        torch.cuda.synchronize()  # an earlier upload may still read the host's side
    host, position = captured.tensors.host, context - 1
    blocks = host["block_table"][:, position // block_size].long()
    host["slot_mapping"].copy_(blocks * block_size + position % block_size)
    host["position_ids"].fill_(position)
    host["seq_lens"].fill_(context)
    host["remaining"].fill_(2**30)
    host["active"].fill_(grows)
    captured.tensors.upload()


def interval_ms(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Milliseconds of one of `repeats` runs in a row, on the device where it is a GPU."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return 1e3 * (time.perf_counter() - begin) / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


@torch.no_grad()
def capture_all(session: DecodeSession) -> Captures:
    """Compile, then capture what a session captures before its first step; it must be lazy."""
    session.warm_up()
    before = device_bytes(session.device)
    keys = session.plan.first_keys()
    begin = time.perf_counter()
    for mode, key in keys:
        session.graphs.get(key, mode)
    seconds = time.perf_counter() - begin
    after = device_bytes(session.device)
    assert session.graphs is not None, session.graph_mode_why
    return Captures(
        session.graph_mode.name,
        session.decode_steps,
        len(session.graphs),
        session.compile_seconds,
        session.counters.num_graphs,
        seconds,
        session.graphs.num_bytes,
        None if before is None or after is None else after - before,
    )


def device_bytes(device: torch.device) -> int | None:
    """Memory of the device that is taken, after the allocator has given back what is free."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def address_check_us(
    session: DecodeSession, batch: int, *, weights: bool, calls: int = 200
) -> float:
    """Host microseconds of the check before a replay: median over seven times `calls` of them.

    Args:
        weights: those too, as before the first of the replays that are launched together.
    """
    graphs, key = session.graphs, BatchDescriptor(batch, batch, uniform=True)
    assert graphs is not None, session.graph_mode_why
    captured = session.graphs.get(key, session.graph_mode.decode_mode())
    assert captured is not None, "failures raise"
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(calls):
            graphs.check_addresses(captured, weights=weights)
        times.append(1e6 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)
