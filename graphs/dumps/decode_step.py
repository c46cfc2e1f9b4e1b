"""Runs a decode step of a session on padding, without a change to its requests.

The rows read as many cached tokens as a request may have, and write only the null block.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from attn_ops import PAD_SLOT_ID
from attn_ops.states import NULL_SLOT
from graphs.capture.recorder import metadata_now
from graphs.capture.store import CapturedStep
from graphs.capture.verified import VerifiedReplay
from graphs.modes import BatchDescriptor
from graphs.sampling import FIELDS
from graphs.sampling.params import Sampling
from graphs.step.tensors import TABLES, StepTensors


class NoStep(Exception):
    """No step can be run; the text says why."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that can be run any number of times."""

    kind: str  # "replay" or "called"
    what: str
    key: BatchDescriptor
    seq_len: int  # tokens of every request
    run: Callable[[], object]


@contextlib.contextmanager
def decode_step(session: Any) -> Iterator[Measured]:
    """The largest decode step of a session: replayed if it is captured, else called.

    Inside the block the step's tensors are its own; after it they hold what they held.

    Raises:
        NoStep: the session's state does not allow one.
    """
    if not session.loop.is_idle and session.num_unfinished:
        raise NoStep("steps are launched whose tokens nobody has read; let the requests end first")
    on_gpu = session.device.type == "cuda" and session.plan.debug is None
    captured = _largest(session) if on_gpu else None
    made = _called(session) if captured is None else _replayed(session, captured)
    with made as measured:
        yield measured


def _largest(session: Any) -> CapturedStep | None:
    """The largest captured decode step without penalties, whose counts a replay would change."""
    found = [
        captured
        for captured in session.graphs or ()
        if captured.key.query_len == 1 and captured.key.sampling is not Sampling.PENALIZED
    ]
    return max(found, key=lambda c: (c.key.num_reqs, -c.key.sampling), default=None)


@contextlib.contextmanager
def _replayed(session: Any, captured: CapturedStep) -> Iterator[Measured]:
    graph, tensors = captured.graph, captured.tensors
    graph = graph.graph if isinstance(graph, VerifiedReplay) else graph
    try:
        session.graphs.check_addresses(captured)
    except ValueError as error:
        raise NoStep(str(error)) from error
    torch.cuda.synchronize()
    host, device = tensors.host_bytes.clone(), tensors.device_bytes.clone()
    try:
        seq_len = _fill(tensors, session)
        metadata = None if graph.plan is None else graph.plan()
        what = f"replay of a captured step ({captured.mode.name})"
        yield Measured("replay", what, captured.key, seq_len, lambda: graph.replay(metadata))
    finally:
        torch.cuda.synchronize()
        tensors.host_bytes.copy_(host)
        tensors.device_bytes.copy_(device)
        if graph.plan is not None:
            graph.plan()  # plans in place belong to the tensors
        torch.cuda.synchronize()


@contextlib.contextmanager
def _called(session: Any) -> Iterator[Measured]:
    number = session.max_batch_size
    step = session.runner.step(BatchDescriptor(number, number, uniform=True))
    seq_len = _fill(step.tensors, session)
    metadata = metadata_now(session.builder, step.tensors)
    on_cpu = session.device.type != "cuda"
    what = "called step, CPU operators" if on_cpu else "called step, not captured"
    with torch.compiler.set_stance("fail_on_recompile"):
        yield Measured("called", what, step.key, seq_len, lambda: step.run(metadata))


def _fill(tensors: StepTensors, session: Any) -> int:
    """Fill a step with padding that reads blocks of the cache; returns the tokens each row reads.

    As many as a request may have, or fewer if the cache does not hold that for all of them. Slots
    stay those of padding, and no row is active: only the null block is written, and no state.
    """
    cache, number = session.cache, tensors.num_reqs
    blocks = min(tensors.arrays["block_table"].shape[1], max(1, (cache.num_blocks - 1) // number))
    seq_len = min(session.max_tokens, blocks * cache.block_size)
    arrays = tensors.arrays
    for name in ("input_ids", "remaining", "active"):
        arrays[name].fill(0)
    for name in ("stop_tokens", "sources", *map(TABLES.__getitem__, tensors.versions)):
        arrays[name].fill(PAD_SLOT_ID)
    if "state_slots" in arrays:
        arrays["state_slots"].fill(NULL_SLOT)
    for name, (_, neutral) in FIELDS.items():
        arrays[name].fill(neutral)
    places = np.arange(number * blocks).reshape(number, blocks)
    sizes = {"block_table": cache.num_blocks, "window_block_table": cache.window_blocks}
    for name in tensors.versions:
        arrays[name][:, :blocks] = 1 + places % (sizes[name] - 1)
    arrays["seq_lens"][:] = seq_len
    arrays["position_ids"][:] = seq_len - 1
    tensors.upload()
    return seq_len
