"""The contract of a recorder, kept by each: its graphs give the tokens of steps that are called."""

import pytest

from attn_ops.backends.grouped import grouped_backend
from graphs.capture.piecewise import PiecewiseGraph, PiecewiseRecorder
from graphs.capture.plan import resolve
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
    if prepares:
        session.builder.prepare_capture = lambda common: session.builder.build(0, common)
    assert session.generate(PROMPTS, 6) == want
    assert session.num_steps["called"] == 0
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


def is_sliding(spec) -> bool:
    return spec.sliding_window is not None


@pytest.mark.slow
def test_only_layers_of_a_weak_group_stand_between_graphs(make_model):
    """The others are recorded, with metadata that the recording builds."""
    model = make_model("gemma2", num_layers=4, head_dim=32)
    backend = grouped_backend({is_sliding: "TORCH"}, default="TRITON")
    options = {"backend": backend, "block_size": 16}
    want = uncaptured(model, **options).generate(PROMPTS[:2], 3)
    session = captured(model, cudagraph_mode="FULL", lazy_capture=True, **options)
    assert session.graphs is not None
    session.plan.resolution = resolve(FULL, session.plan.resolution.groups, "cuda")
    session.graphs.recorders = {PIECEWISE: RECORDERS["pieces"][1](session)}
    assert session.generate(PROMPTS[:2], 3) == want
    assert len(session.graphs) > 1
    for c in session.graphs:
        assert isinstance(c.graph, PiecewiseGraph)
        assert (c.graph.num_breaks, c.graph.num_segments) == (2, 3)
