"""Captured decode steps of the Llama-3-8B shape: `python -m benchmarks.graphs`.

    floor      products by cuBLAS and attention by FA3, in one CUDA graph (benchmarks/floor.py);
               where vllm_flash_attn is installed
    replay     our graph alone, one replay behind the other
    per token  wall time through `DecodeSession.step`
    gap        per token - replay
    host       wall time without the host's waits for tokens

bf16, random weights, merged projections; requests of 1024 tokens, of which all but the last are
taken for computed. FULL runs decode steps by the same graphs as FULL_DECODE_ONLY.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any
from unittest import mock

import torch

from attn_ops.backends.flash_attn import fa_version
from benchmarks.decode_step import decode_graph, merged
from benchmarks.floor import Shape, Weights, floor_graph
from benchmarks.harness import finish, free, median_ms, origin, parser_of, synchronize, used_gib
from benchmarks.shapes import llama_3_8b, tiny_llama
from graphs import DecodeSession
from graphs.capture.store import CapturedStep
from graphs.launcher import LaunchedSteps

RUNS = [("FULL_DECODE_ONLY", 8), ("FULL_DECODE_ONLY", 4), ("FULL_DECODE_ONLY", 1), ("PIECEWISE", 1)]
"""Modes and decode steps of the sessions."""
ALL_SIZES = ("FULL_DECODE_ONLY", 1)
"""Captures the default sizes. Not the first session, whose captures compile kernels."""


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


QUICK = {"warm": 8, "timed": 16, "repeats": 8, "rounds": 2}
"""On a CPU."""


@contextlib.contextmanager
def watched_waits() -> Iterator[list[float]]:
    """Seconds of waits for launched steps inside the block, timed from outside of `graphs`."""
    waits, original = [], LaunchedSteps.wait

    def wait(launched: LaunchedSteps) -> list[list[int]]:
        if launched.arrived is not None:
            begin = time.perf_counter()
            launched.arrived.synchronize()
            waits.append(time.perf_counter() - begin)
        return original(launched)

    with mock.patch.object(LaunchedSteps, "wait", wait):
        yield waits


@torch.no_grad()
def measure_case(session: DecodeSession, batch: int, lengths: Lengths) -> dict[str, float]:
    """Steps of `batch` requests, then replays of their graph at the same lengths; of one token."""
    wall_ms, host_us = step_times(session, batch, lengths)
    replayed = replay_ms(
        session, decode_graph(session, batch, session.graph_mode.decode_mode()), lengths
    )
    return {
        "replay, ms": replayed,
        "per token, ms": wall_ms,
        "per token / replay": wall_ms / replayed,
        "gap, us": 1000 * (wall_ms - replayed),
        "host, us a step": host_us,
        "host busy": host_us / 1000 / wall_ms,
    }


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
    return 1e3 * seconds / steps, 1e6 * (seconds - sum(waits)) / steps


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
    synchronize()  # an earlier upload may still read the host's side
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
def capture_all(session: DecodeSession) -> dict[str, Any]:
    """Compile, then capture what a session captures before its first step; it must be lazy."""
    session.warm_up()
    before = used_gib()
    keys = session.plan.first_keys()
    begin = time.perf_counter()
    for mode, key in keys:
        session.graphs.get(key, mode)
    seconds = time.perf_counter() - begin
    return {
        "graphs": len(session.graphs),
        "compile, s": session.compile_seconds,
        "compiled": session.counters.num_graphs,  # 0 where an earlier session's are used
        "seconds": seconds,
        "pool, GiB": session.graphs.num_bytes / 2**30,
        "device, GiB": used_gib() - before,
    }


def address_check_us(session: DecodeSession, batch: int, weights: bool) -> float:
    """Host microseconds of the check before a replay: median over seven times 200 of them.

    Args:
        weights: those too, as before the first of the replays that are launched together.
    """
    captured = decode_graph(session, batch, session.graph_mode.decode_mode())
    calls, times = 200, []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(calls):
            session.graphs.check_addresses(captured, weights=weights)
        times.append(1e6 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)


def make_session(
    model: Any, mode: str, decode_steps: int, args: argparse.Namespace, lengths: Lengths
) -> DecodeSession:
    """Caches and tables have the same shapes in all sessions, which share what is compiled."""
    batches, on_gpu = args.cases, args.device == "cuda"
    session = DecodeSession(
        model,
        max_batch_size=max(batches),
        max_tokens=lengths.longest(max(steps for _, steps in RUNS)),
        cudagraph_mode=mode,
        backend=args.backend,
        max_tokens_per_step=max(2048, max(batches)),
        capture_sizes=None if (mode, decode_steps) == ALL_SIZES else batches,
        mixed_capture_sizes=[],
        decode_steps=decode_steps,
        debug=None if on_gpu else "eager_replay",
        strict=True,
        lazy_capture=True,
    )
    for cache in session.cache.tensors:
        cache[1:].normal_()
    return session


def floors_ms(config: Any, batches: Sequence[int], context: int) -> dict[int, float]:
    """By batch; on caches of its own, because the sessions' are gone."""
    shape = Shape.of(config)
    blocks = max(batches) * -(-context // 16) + 1
    caches = [
        torch.randn(
            blocks, 2, 16, shape.kv_heads, shape.head_size, device="cuda", dtype=torch.bfloat16
        )
        for _ in range(shape.layers)
    ]
    weights = Weights(shape)
    return {
        batch: median_ms(floor_graph(shape, weights, caches, batch, context).replay)
        for batch in batches
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One session after the other on one compiled model; captures first, then every batch."""
    on_gpu = args.device == "cuda"
    lengths = Lengths(args.context, **({} if on_gpu else QUICK))
    config = llama_3_8b(args.layers) if on_gpu else tiny_llama(args.layers)
    model = merged(config, args.device)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.graphs", **origin(args), "layers": args.layers,
        "lengths": dataclasses.asdict(lengths), "captures": {}, "rows": {},
    }  # fmt: skip
    for mode, decode_steps in RUNS:
        session = make_session(model, mode, decode_steps, args, lengths)
        result["captures"][f"{mode}, decode_steps {decode_steps}"] = capture_all(session)
        for batch in args.cases:
            name = f"{mode}, batch {batch}, decode_steps {decode_steps}"
            result["rows"][name] = measure_case(session, batch, lengths)
        if (mode, decode_steps) == ALL_SIZES:
            result["backend"] = session.backend_selection.backend.name
            result["address check, us"] = {
                name: address_check_us(session, args.cases[-1], weights)
                for name, weights in (("without weights", False), ("with weights", True))
            }
        session.release()
        del session
        free()
    del model
    torch._dynamo.reset()
    free()
    if on_gpu and fa_version() is not None:
        floors = floors_ms(config, args.cases, args.context)
        for (_, batch), row in zip(product(RUNS, args.cases), result["rows"].values(), strict=True):
            row["floor, ms"] = floors[batch]
            row["replay / floor"] = row["replay, ms"] / floors[batch]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--layers", type=int, default=None, help="default: 32; 2 on a CPU")
    parser.add_argument("--cases", nargs="+", type=int, default=[1, 8, 64, 256], help="batches")
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args(arguments)
    args.layers = args.layers or (32 if args.device == "cuda" else 2)
    args.cases = sorted(set(args.cases))
    result = measure(args)
    finish(args, result)
    for name in ("captures", "address check, us"):
        print(name, result[name])


if __name__ == "__main__":
    main()
