"""What the host does before a step of many requests: `python -m benchmarks.host_step`.

    schedule    which requests run, with how many tokens each
    fill        the step's tensors on the host, all requests as in the last step
    moved       the same after a request left: the rows of all later ones move
    new graph   the same into the tensors of another graph
    by rows     the same request by request, as a reference

Decodes of a tiny model on the CPU: the host's work does not depend on the model. Every figure is a
median of rounds in turns, in microseconds of this thread, whatever else the machine does.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from attn_ops import PAD_SLOT_ID
from attn_ops.metadata import positions_of_step, slots_of_step
from benchmarks.decode_step import build
from benchmarks.shapes import tiny_llama
from graphs import DecodeSession
from graphs.requests.batch import Rows
from graphs.requests.requests import MAX_STOP_TOKENS
from graphs.sampling import FIELDS
from graphs.sampling.params import Sampling
from graphs.step.tensors import StepTensors


def fill_by_rows(
    tensors: StepTensors, step: Rows, tables: Sequence[Sequence[int]], block_size: int
) -> None:
    """`StepTensors.fill` request by request, everything else padding."""
    host = tensors.arrays
    tensors.host_bytes.numpy().fill(0)
    host["slot_mapping"].fill(PAD_SLOT_ID)
    host["stop_tokens"].fill(-1)
    host["sources"].fill(-1)
    host["group_starts"][1:] = tensors.num_reqs
    for name, (_, neutral) in FIELDS.items():
        host[name].fill(neutral)
    query = np.array([s.num_tokens for s in step], dtype=np.int32)
    computed = np.array([s.num_computed for s in step], dtype=np.int32)
    start = np.zeros(len(step) + 1, dtype=np.int32)
    np.cumsum(query, out=start[1:])
    num_tokens, num_reqs = int(start[-1]), len(step)
    for row, blocks in zip(host["block_table"], tables, strict=False):
        row[: len(blocks)] = blocks
    host["input_ids"][0, :num_tokens] = [t for s in step for t in s.tokens()]
    positions = positions_of_step(query, computed, start)
    last = np.array([s.request.max_tokens - 1 for s in step], dtype=np.int64)
    host["position_ids"][0, :num_tokens] = np.minimum(positions, np.repeat(last, query))
    room = np.array([len(blocks) for blocks in tables], dtype=np.int64) * block_size
    slots = slots_of_step(query, computed, start, host["block_table"][:num_reqs], block_size)
    beyond = positions >= np.repeat(room, query)
    host["slot_mapping"][:num_tokens] = np.where(beyond, PAD_SLOT_ID, slots)
    if tensors.query_len is None:
        host["query_start_loc"].fill(num_tokens)
        host["query_start_loc"][-1] = tensors.num_tokens
        host["logits_indices"][:num_reqs] = start[1:] - 1
        host["num_logits"][0] = num_reqs
    else:
        host["query_start_loc"][:] = np.arange(tensors.num_reqs + 1) * tensors.query_len
        host["logits_indices"][:] = np.arange(tensors.num_tokens)
    host["query_start_loc"][: num_reqs + 1] = start
    host["seq_lens"][:num_reqs] = computed + query
    for name in FIELDS:
        host[name][:num_reqs] = [getattr(s.request.sampling, name) for s in step]
    host["remaining"][:num_reqs] = [s.remaining for s in step]
    host["sources"][:num_reqs] = [s.source for s in step]
    host["active"][:num_reqs] = True
    for row, scheduled in zip(host["stop_tokens"], step, strict=False):
        stops = sorted(scheduled.request.stops)[:MAX_STOP_TOKENS]
        row[: len(stops)] = stops


def make_session(batch: int, context: int) -> DecodeSession:
    """All requests decode, as if their prompts were computed."""
    model: Any = build(tiny_llama(1), "attn_ops", "cpu")
    session = DecodeSession(
        model, max_batch_size=batch, max_tokens=context + 64, max_tokens_per_step=8192
    )
    for _ in range(batch):
        session.add([1] * context, 64, eos=())
    for request in session.scheduler.waiting:
        request.num_computed = context - 1
    return session


def cases(session: DecodeSession) -> dict[str, Callable[[], object]]:
    """What is timed."""
    scheduler, runner, batch = session.scheduler, session.runner, session.max_batch_size
    step = scheduler.next_step()
    moved = Rows(step[1:] or step)
    same, others = (
        StepTensors.allocate(batch, batch, runner.max_blocks, session.device, query_len=1)
        for _ in range(2)
    )

    def schedule() -> None:
        rows = scheduler.next_step()
        _ = rows.query_len, rows.kind, rows.num_tokens, rows.any_logits, rows.takes_tokens

    def fill(tensors: StepTensors, rows: Rows) -> None:
        runner.fill(tensors, rows, Sampling.GREEDY)

    def move() -> None:
        fill(same, moved)
        fill(same, step)

    def another() -> None:
        others.versions["block_table"].fill(-1)
        fill(others, step)

    def by_rows() -> None:
        tables = [session.cache.blocks(s.request.id) for s in step]
        fill_by_rows(others, step, tables, session.cache.block_size)

    return {
        "schedule": schedule,
        "fill": lambda: fill(same, step),
        "moved": move,
        "new graph": another,
        "by rows": by_rows,
    }


def measure(batch: int, context: int, rounds: int) -> dict[str, float]:
    """Microseconds by case."""
    found = cases(make_session(batch, context))
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, run in found.items():
            begin = time.thread_time_ns()
            run()
            times[name].append(1e-3 * (time.thread_time_ns() - begin))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    medians["moved"] /= 2
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for batch in args.batches:
        found = measure(batch, args.context, args.rounds)
        found["schedule + moved"] = found["schedule"] + found["moved"]
        print(f"batch {batch}, us:", {name: round(us) for name, us in found.items()})


if __name__ == "__main__":
    main()
