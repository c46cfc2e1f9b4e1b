"""The timeline of a decode step: what is in it, and that the session does not notice."""

import json
from typing import Any

import pytest
import torch

import fx_passes
import graphs
from graphs.dumps import decode_step as step_module
from graphs.dumps.data import read
from graphs.dumps.page import whole
from graphs.dumps.timeline import Kernel, in_turn, kernels_in, timeline_of, times_of
from tests.kit.sessions import captured, drain, make_session

PROMPTS = [[1, 2, 3], list(range(20))]


def session_of(model, **options) -> graphs.DecodeSession:
    compiled: Any = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    return make_session(compiled, **options)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory, make_model):
    """A dump that ends while requests run, and what they had and got."""
    model = make_model("llama", num_hidden_layers=3)
    alone = make_session(model)
    expected = [alone.generate([prompt], 6)[0].token_ids for prompt in PROMPTS]
    session = session_of(model)
    ids = [session.add(prompt, 6) for prompt in PROMPTS]
    with graphs.dump(tmp_path_factory.mktemp("timeline")) as directory:
        outputs = session.step() + session.step()
        before = [cache[1:].clone() for cache in session.cache.tensors]
        report = session.report().as_dict()
    after = [cache[1:].clone() for cache in session.cache.tensors]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    reports = report, session.report().as_dict()
    streamed = drain(session, outputs)
    return directory, expected, [streamed[i] for i in ids], same, reports


@pytest.mark.slow
def test_the_session_goes_on_as_if_nothing_had_run(dumped):
    _, expected, found, same, (before, after) = dumped
    assert found == expected
    assert same, "only the null block may change"
    assert before == after


def test_a_called_step(dumped):
    directory = dumped[0]
    data = whole(directory)
    timeline = data["timeline"]
    assert (data["timeline_why"], timeline["kind"]) == ("", "called")
    assert timeline["what"] == "called step, CPU operators"
    assert (timeline["num_reqs"], timeline["seq_len"]) == (4, 64)
    products = [one for one in timeline["calls"] if one["names"] == ["aten::mm"]]
    layers, layer = 3, 4 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # q, o and k, v and the MLP
    weights = layers * (layer - 2 * 64 * 64) + 64 * 64  # q and o are 64 x 64, as is the head
    rows = 4 * (layers * (9 * 64 + 2 * 32 + 3 * 96) + 2 * 64)
    assert sum(one["num"] * one["bytes"] for one in products) == 4 * (weights + rows)
    attention = [one for one in timeline["calls"] if one["names"] == ["attn_ops::attention"]]
    cached, query = 4 * 64 * 2 * 2 * 16 * 4, 4 * 2 * 64 * 4
    assert sum(one["num"] for one in attention) == 3
    assert {one["bytes"] for one in attention} == {cached + query}
    names = [timeline["names"][row[2]] for row in timeline["rows"]]
    layers_of = [row[5] for row, n in zip(timeline["rows"], names, strict=True) if "::att" in n]
    assert layers_of == [1, 2, 3]
    trace = json.loads((directory / timeline["trace"]).read_text())
    assert trace["traceEvents"]
    assert timeline["trace"] in (directory / "index.md").read_text()


def test_no_session_no_timeline(tmp_path):
    with graphs.dump(tmp_path) as directory:
        pass
    data = read(directory)
    assert data["timeline"] is None
    assert data["timeline_why"] == "no decode session was compiled inside"


def test_not_beside_a_profiler_or_inside_of_a_step(model, tmp_path):
    session = make_session(model)
    with torch.profiler.profile():
        assert timeline_of(session, tmp_path)[1] == "a profiler was running"
    with session.lock:
        assert timeline_of(session, tmp_path)[1] == "the block ended inside of a step"
    assert list(tmp_path.iterdir()) == []


def test_a_replay_leaves_the_tensors_as_they_were(model, monkeypatch):
    """As on a GPU, with graphs that call their step."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    session = captured(model, capture_sizes=[2, 4])
    expected = captured(model, capture_sizes=[2, 4]).generate(PROMPTS, 6)
    ids = [session.add(prompt, 6) for prompt in PROMPTS]
    outputs = session.step() + session.step()
    graph = step_module._largest(session)
    assert graph is not None
    assert graph.key.num_reqs == 4
    graph.num_replays = 5
    host, device = graph.tensors.host_bytes.clone(), graph.tensors.device_bytes.clone()
    caches = [cache[1:].clone() for cache in session.cache.tensors]
    with step_module._replayed(session, graph) as measured:
        assert measured.seq_len == 64
        measured.run()
        measured.run()
        assert not torch.equal(graph.tensors.device_bytes, device)
        assert graph.tensors.device["seq_lens"].tolist() == [64] * 4
    assert torch.equal(graph.tensors.host_bytes, host)
    assert torch.equal(graph.tensors.device_bytes, device)
    pairs = zip(caches, session.cache.tensors, strict=True)
    assert all(torch.equal(before, after[1:]) for before, after in pairs)
    assert graph.num_replays == 5
    streamed = drain(session, outputs)
    assert [streamed[i] for i in ids] == [one.token_ids for one in expected]


def test_not_while_steps_are_launched(model, monkeypatch):
    session = captured(model)
    session.add([1, 2], 6)
    monkeypatch.setattr(type(session.loop), "is_idle", False)
    with (
        pytest.raises(step_module.NoStep, match="tokens nobody has read"),
        step_module.decode_step(session),
    ):
        pass


def test_a_kernel_that_is_launched_early_counts_from_the_end_of_those_before():
    """Of kernels by (begin, end): when each has the device for itself."""
    spans = [(0, 10), (4, 12), (5, 6), (11, 15), (20, 22)]
    kernels = in_turn([Kernel(str(i), a, b - a) for i, (a, b) in enumerate(spans)])
    assert [(k.start_us, k.us, k.early_us) for k in kernels] == [
        (0, 10, 0), (10, 2, 6), (6, 0, 1), (12, 3, 1), (20, 2, 0),
    ]  # fmt: skip
    times = times_of(kernels)
    assert sum(k.us for k in kernels) == times["sum_us"] == 17
    assert (times["span_us"], times["gap_us"]) == (22, 5)


def test_events_of_a_gpu(tmp_path):
    path = tmp_path / "trace.json"
    event = {"ph": "X", "ts": 5.0, "dur": 2.5, "args": {}}
    events = [
        event | {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 9.0},
        event | {"cat": "kernel", "name": "nvjet"},
        event | {"cat": "cuda_runtime", "name": "cudaGraphLaunch"},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert kernels_in(path, on_gpu=True) == [
        Kernel("nvjet", 0.0, 2.5), Kernel("Memcpy DtoD", 4.0, 2.5)
    ]  # fmt: skip
    assert kernels_in(path, on_gpu=False) == []
