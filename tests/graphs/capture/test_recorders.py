"""The contract of a recorder, kept by each: its graphs give the tokens of steps that are called."""

import pytest
import torch

from graphs.capture.piecewise import PiecewiseRecorder
from graphs.capture.recorder import RerunRecorder, WholeGraph, plan_in_place
from graphs.modes import CUDAGraphMode
from tests.graphs.capture.tape import TapeRecorder, TapeSegments
from tests.kit.sessions import captured, uncaptured

PROMPTS = [[3], [5, 9], list(range(1, 18)), [1, 2, 3, 4], [7] * 9]
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class TapeWholeRecorder:
    """As `WholeRecorder`, on tapes."""

    def __init__(self, builder) -> None:
        self.builder, self.tapes = builder, TapeRecorder()

    def metadata(self, step):
        return self.builder.prepare_capture(step.common_on_host())

    def warm_up(self, step, metadata) -> None:
        step.run(metadata)

    def record(self, step, metadata) -> WholeGraph:
        tape, num_bytes = self.tapes.record(lambda: step.run(metadata))
        return WholeGraph(tape, num_bytes, metadata, plan_in_place(self.builder, step, metadata))  # pyright: ignore[reportArgumentType]

    def release(self) -> None:
        self.tapes.release()


RECORDERS = {
    "whole": (FULL, lambda s: TapeWholeRecorder(s.builder)),
    "pieces": (
        PIECEWISE,
        lambda s: PiecewiseRecorder(s.builder, TapeSegments(), s.plan.breaks),
    ),
    "rerun": (FULL, lambda s: RerunRecorder(s.builder, in_pieces=False)),
    "rerun in pieces": (PIECEWISE, lambda s: RerunRecorder(s.builder, in_pieces=True)),
}


def recorded_by(name, model, **options):
    """A session whose graphs one recorder makes."""
    mode, make = RECORDERS[name]
    session = captured(model, cudagraph_mode=mode, **options)
    assert session.graphs is not None
    session.graphs.recorders = {mode: make(session)}
    return session


def plans_on_the_host(builder) -> list[list[int]]:
    """Make a builder one that plans whole graphs; lengths of the replays that it plans."""
    prepare_replay, planned = builder.prepare_replay, []

    def prepare(metadata, common):
        planned.append(common.seq_lens_cpu.tolist())
        assert metadata.common.seq_lens is common.seq_lens, "the batch of the captured step"
        assert torch.equal(common.seq_lens_cpu, common.seq_lens), "uploaded before it is planned"
        computed = (common.seq_lens_cpu - common.query_start_loc_cpu.diff()).clamp(min=0)
        assert torch.equal(common.num_computed_tokens_cpu, computed)
        return prepare_replay(metadata, common)

    builder.prepare_capture = lambda common: builder.build(0, common)
    builder.prepare_replay = prepare
    return planned


@pytest.mark.parametrize("prepares", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECORDERS)
def test_replays_give_the_tokens_of_calls(model, name, prepares):
    """Prompts in chunks, and requests that come while others decode.

    `prepares`: the host plans whole graphs too.
    """
    mode, _ = RECORDERS[name]
    options = {"max_tokens_per_step": 16, "mixed_capture_sizes": [8, 16]}
    want = uncaptured(model, max_tokens_per_step=16).generate(PROMPTS, 6)
    session = recorded_by(name, model, **options)
    planned = plans_on_the_host(session.builder) if prepares else []
    assert session.generate(PROMPTS, 6) == want
    assert session.num_steps["called"] == 0
    if prepares and mode is FULL:
        assert len(planned) == session.num_steps["captured"]
        assert any(lens[-1] == 0 for lens in planned), "padding requests have no tokens"
    assert session.graphs is not None
    graphs = list(session.graphs)
    assert {c.mode for c in graphs} == {mode}
    for c in graphs:
        assert c.needs_host == (c.graph.plan is not None) == (prepares or mode is PIECEWISE)
        assert (c.graph.metadata is not None) == (prepares and mode is FULL)
        assert c.graph.num_bytes >= 0
    assert session.graphs.num_bytes == sum(c.graph.num_bytes for c in graphs)
    assert (session.graphs.num_bytes > 0) == ("rerun" not in name)
    session.release()
    assert session.generate(PROMPTS, 6) == want


def test_moved_caches_are_refused_before_anything_is_planned(model):
    session = captured(model, cudagraph_mode=FULL)
    planned = plans_on_the_host(session.builder)
    session.warm_up()
    planned.clear()
    graph = next(iter(session.graphs))
    session.cache.tensors[0] = session.cache.tensors[0].clone()
    with pytest.raises(ValueError, match="tensors of a captured step must stay where they were"):
        session.graphs.replay(graph)
    assert planned == []
