"""What a backend that plans on the host is asked, and when: a graph that runs again, on a CPU."""

import pytest
import torch

from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession
from graphs.capture.recorder import Rerun, RerunRecorder, plan_in_place
from tests.kit.sessions import captured, uncaptured

PROMPTS = [[3], [5, 9], list(range(17)), [1, 2, 3, 4]]


class FakeGraph(Rerun):
    """Stands for a captured graph: what it reads by address, it reads again."""

    num_bytes = 10

    def __init__(self, step, metadata, plan, events) -> None:
        super().__init__(step, metadata, metadata, plan)
        self.events = events
        step.run(metadata)

    def replay(self, metadata=None) -> None:
        assert metadata is None, "the graph has its own"
        self.events.append("replay")
        super().replay()


class FakeRecorder(RerunRecorder):
    def __init__(self, builder, events) -> None:
        super().__init__(builder, in_pieces=False)
        self.events = events

    def warm_up(self, step, metadata) -> None:
        self.events.append("warm_up")
        super().warm_up(step, metadata)

    def record(self, step, metadata) -> FakeGraph:
        self.events.append("record")
        plan = plan_in_place(self.builder, step, metadata)
        return FakeGraph(step, metadata, plan, self.events)


def record_hooks(builder, events, prepares: bool) -> None:
    """Make `builder` one that plans on the host, or one that does not, and write down its calls."""
    build = builder.build_for_cudagraph_capture

    def prepare_capture(common):
        events.append("prepare_capture")
        return builder.build(0, common) if prepares else None

    def prepare_replay(metadata, common):
        events.append(("prepare_replay", common.seq_lens_cpu.tolist()))
        assert metadata.common.seq_lens is common.seq_lens, "the batch of the captured step"
        assert torch.equal(common.seq_lens_cpu, common.seq_lens), "uploaded before it is planned"
        queries = common.query_start_loc_cpu.diff()
        computed = (common.seq_lens_cpu - queries).clamp(min=0)
        assert torch.equal(common.num_computed_tokens_cpu, computed)

    def build_inside(common):
        events.append("build")
        return build(common)

    builder.prepare_capture, builder.prepare_replay = prepare_capture, prepare_replay
    builder.build_for_cudagraph_capture = build_inside


def made(model, prepares: bool) -> tuple[DecodeSession, list]:
    options = {"capture_sizes": [2, 4], "cudagraph_mode": "FULL_DECODE_ONLY"}
    session, events = captured(model, **options), []
    record_hooks(session.builder, events, prepares)
    session.graphs.recorders[CUDAGraphMode.FULL] = FakeRecorder(session.builder, events)
    return session, events


@pytest.mark.parametrize("prepares", [False, True])
def test_hooks_are_called_in_order(model, prepares):
    session, events = made(model, prepares)
    session.warm_up()
    inside = [] if prepares else ["build"]
    step = ["prepare_capture", "warm_up", *inside, "record", *inside]
    assert events == step * 2, "one graph a size, largest first"
    captured = session.graphs.get(BatchDescriptor(4, 4, uniform=True))
    assert (captured.graph.metadata is not None) == prepares
    assert captured.needs_host == prepares
    assert session.graphs.num_bytes == 20
    events.clear()
    results = session.generate(PROMPTS, 4)
    assert results == uncaptured(model).generate(PROMPTS, 4)
    assert session.num_steps["captured"] == events.count("replay") == 3
    lengths = [[len(p) + n for p in PROMPTS] for n in (1, 2, 3)]
    each = [[("prepare_replay", n), "replay"] if prepares else ["replay", "build"] for n in lengths]
    assert events == [event for events_of_step in each for event in events_of_step]


def test_padding_requests_have_no_tokens(model):
    """Three requests in a graph of four: the host plans a request without tokens."""
    session, events = made(model, True)
    session.generate(PROMPTS[:3], 2)
    assert ("prepare_replay", [2, 3, 18, 0]) in events


def test_moved_caches_are_refused_before_anything_is_planned(model):
    session, events = made(model, True)
    session.warm_up()
    captured = session.graphs.get(BatchDescriptor(2, 2, uniform=True))
    events.clear()
    session.cache.tensors[0] = session.cache.tensors[0].clone()
    with pytest.raises(ValueError, match="tensors of a captured step must stay where they were"):
        session.graphs.replay(captured)
    assert events == []
