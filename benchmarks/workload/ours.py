"""The workload in a `DecodeSession`: wall time, then times by kind of step, then a profile."""

import dataclasses
import time
from typing import Any

import torch

from benchmarks.workload.idle import Idle, profiled
from benchmarks.workload.launches import Kind, by_kind, timed_launches
from benchmarks.workload.requests import Wish, Workload, num_output_tokens
from graphs import DecodeSession

RUNS = [
    ("auto", 1), ("auto", 4), ("FULL_DECODE_ONLY", 1), ("FULL_DECODE_ONLY", 4), ("FULL", 1),
    ("FULL", 4), ("FULL_AND_PIECEWISE", 1), ("FULL_AND_PIECEWISE", 4), ("PIECEWISE", 1),
    ("NONE", 1),
]  # fmt: skip
"""Modes and decode steps of the sessions."""

PROFILED_STEPS = 300


@dataclasses.dataclass
class Ours:
    """One session's figures."""

    mode: str
    decode_steps: int
    wall_s: float  # the fastest of the runs
    tokens_per_s: float  # output tokens
    gpu_s: float | None  # sum of the times of all launches, in a run of its own
    kinds: list[Kind]
    idle: Idle | None  # of `PROFILED_STEPS` steps; None: not measured
    num_launches: dict[str, int]  # ahead and waited, of the fastest run
    same_tokens: float | None = None  # share of requests with the tokens of the first session
    tokens: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def over_gpu(self) -> float | None:
        return None if self.gpu_s is None else self.wall_s / self.gpu_s


def make_session(
    model: Any, workload: Workload, mode: str, decode_steps: int, on_gpu: bool, **options: Any
) -> DecodeSession:
    return DecodeSession(
        model,
        max_batch_size=workload.max_batch_size,
        max_tokens=workload.max_tokens,
        max_tokens_per_step=workload.max_tokens_per_step,
        cudagraph_mode=mode,
        decode_steps=decode_steps,
        debug=None if on_gpu or mode == "NONE" else "eager_replay",
        **options,
    )


def run_all(session: DecodeSession, wishes: list[Wish]) -> tuple[float, list[list[int]]]:
    """Seconds from the first request to the last token, and the tokens."""
    synchronize(session.device)
    begin = time.perf_counter()
    ids = [session.add(wish.prompt, wish.num_new, eos=()) for wish in wishes]
    while session.num_unfinished:
        session.step()
    seconds = time.perf_counter() - begin
    results = [session.result(request) for request in ids]
    for request in ids:
        session.discard(request)
    return seconds, [result.token_ids for result in results if result is not None]


def measure(
    session: DecodeSession, wishes: list[Wish], rounds: int, *, only_wall: bool = False
) -> Ours:
    """Every figure in a run of its own, after one that compiles and captures."""
    session.warm_up()
    run_all(session, wishes[: max(4, len(wishes) // 8)])
    seconds, tokens, launches = float("inf"), [], {}
    for _ in range(rounds):
        before = dict(session.report().num_launches)
        taken, tokens = run_all(session, wishes)
        if taken < seconds:
            after = session.report().num_launches
            seconds, launches = taken, {name: after[name] - before[name] for name in after}
    mode, decode_steps = session.graph_mode_asked.name, session.decode_steps
    rate, kinds, gpu_s, idle = num_output_tokens(wishes) / seconds, [], None, None
    if not only_wall:
        with timed_launches(session.device) as found:
            run_all(session, wishes)
            synchronize(session.device)
        kinds = by_kind(found)
        gpu_s, idle = sum(kind.ms for kind in kinds) / 1e3, idle_of_session(session, wishes)
    return Ours(mode, decode_steps, seconds, rate, gpu_s, kinds, idle, launches, tokens=tokens)


def idle_of_session(session: DecodeSession, wishes: list[Wish]) -> Idle | None:
    """Of steps in the middle of a run, where requests come and go."""
    ids = [session.add(wish.prompt, wish.num_new, eos=()) for wish in wishes]

    def some(number: int) -> None:
        for _ in range(number):
            if session.num_unfinished:
                session.step()

    some(PROFILED_STEPS // session.decode_steps)
    idle = profiled(lambda: some(max(1, PROFILED_STEPS // session.decode_steps)))
    for request in ids:
        session.discard(request)
    some(2)
    return idle


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
