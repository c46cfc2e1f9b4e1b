"""The workload in a `DecodeSession`: wall time, then the device's time, then a profile."""

import time
from typing import Any

from benchmarks.harness import synchronize
from benchmarks.workload.device_time import idle_of, ms_between, timed_launches
from benchmarks.workload.requests import Wish, Workload, num_output_tokens
from graphs import DecodeSession

RUNS = [
    ("auto", 1), ("auto", 4), ("FULL_DECODE_ONLY", 1), ("FULL_DECODE_ONLY", 4), ("FULL", 1),
    ("FULL", 4), ("FULL_AND_PIECEWISE", 1), ("FULL_AND_PIECEWISE", 4), ("PIECEWISE", 1),
    ("NONE", 1),
]  # fmt: skip
"""Modes and decode steps of the sessions."""

PROFILED_STEPS = 300


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
    synchronize()
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
) -> tuple[dict[str, Any], list[list[int]]]:
    """A row, each figure of a run of its own after one that compiles and captures; and tokens."""
    session.warm_up()
    run_all(session, wishes[: max(4, len(wishes) // 8)])
    seconds, tokens, launches = float("inf"), [], {}
    for _ in range(rounds):
        before = dict(session.report().num_launches)
        taken, tokens = run_all(session, wishes)
        if taken < seconds:
            after = session.report().num_launches
            seconds, launches = taken, {name: after[name] - before[name] for name in after}
    row = {
        "wall, s": seconds,
        "output tokens/s": num_output_tokens(wishes) / seconds,
        "launched ahead": launches["ahead"],
        "waited for": launches["waited"],
    }
    if not only_wall:
        with timed_launches(session.device) as found:
            run_all(session, wishes)
            synchronize()
        row["GPU, s"] = sum(ms_between(*stamps) for stamps in found) / 1e3
        row["wall / GPU"] = seconds / row["GPU, s"]
        row["idle"] = idle_of_session(session, wishes)
    return row, tokens


def idle_of_session(session: DecodeSession, wishes: list[Wish]) -> float | None:
    """In the middle of a run, where requests come and go."""
    ids = [session.add(wish.prompt, wish.num_new, eos=()) for wish in wishes]

    def some(number: int) -> None:
        for _ in range(number):
            if session.num_unfinished:
                session.step()

    some(PROFILED_STEPS // session.decode_steps)
    idle = idle_of(lambda: some(max(1, PROFILED_STEPS // session.decode_steps)))
    for request in ids:
        session.discard(request)
    some(2)
    return idle
