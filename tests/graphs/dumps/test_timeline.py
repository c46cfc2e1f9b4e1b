"""The timeline of a decode step: what is in it, and that the session does not notice."""

import json
from typing import Any

import pytest
import torch

import fx_passes
import graphs
from attn_ops import AttentionSpec
from graphs.dumps.data import read
from graphs.dumps.output_code.groups import group_of
from graphs.dumps.timeline import step as step_module
from graphs.dumps.timeline.layers import Repeats, repeats
from graphs.dumps.timeline.moved import cached_bytes, token_bytes
from graphs.dumps.timeline.record import groups_of, rows_of, timeline_of, times_of
from graphs.dumps.timeline.trace import Kernel, idle_before, in_turn, kernels_in
from tests.kit.models import build_model
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
    data = read(directory)
    timeline = data["timeline"]
    assert (data["timeline_why"], timeline["kind"]) == ("", "called")
    assert timeline["what"] == "called step, CPU operators"
    assert (timeline["num_reqs"], timeline["seq_len"], timeline["num_layers"]) == (4, 64, 3)
    assert timeline["notes"] == []
    rows = timeline["kernels"]
    products = [row for row in rows if row["group"] == "products"]
    layers, layer = 3, 4 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # q, o and k, v and the MLP
    weights = layers * (layer - 2 * 64 * 64) + 64 * 64  # q and o are 64 x 64, as is the head
    rows_read = layers * 4 * (6 * 64 + 96) + 4 * 64
    rows_written = layers * 4 * (2 * 64 + 2 * 32 + 2 * 96 + 64) + 4 * 64
    assert sum(row["bytes"] for row in products) == 4 * (weights + rows_read + rows_written)
    attention = [row for row in rows if row["name"] == "attn_ops::attention"]
    assert [row["layer"] for row in attention] == [0, 1, 2]
    cached, query = 4 * 64 * 2 * 2 * 16 * 4, 4 * 2 * 64 * 4
    assert {row["bytes"] for row in attention} == {cached + query}
    assert timeline["groups"]["attention"]["bytes"] == 3 * (cached + query)
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
        assert timeline_of(session, tmp_path, [])[1] == "a profiler was running"
    with session.lock:
        assert timeline_of(session, tmp_path, [])[1] == "the block ended inside of a step"
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


def test_layers_that_read_the_cache_of_another(tmp_path):
    """Of five layers the last two do; 0, 1 and 3 see six tokens."""
    session = make_session(build_model("gemma4"))
    timeline, why = timeline_of(session, tmp_path, [])
    assert timeline is not None, why
    rows = [row for row in timeline["kernels"] if row["name"] == "attn_ops::attention"]
    num_reqs, seq_len = timeline["num_reqs"], timeline["seq_len"]
    head_size, heads, kv_heads = {False: 32, True: 16}, 4, 2
    assert [row["bytes"] for row in rows] == [
        num_reqs * 4 * head_size[short] * (2 * kv_heads * (6 if short else seq_len) + 2 * heads)
        for short in (True, True, False, True, False)
    ]
    assert timeline["notes"] == ["bytes of products are not known: 0 products are called, "
                                 f"{sum(r['group'] == 'products' for r in timeline['kernels'])} "
                                 "kernels have their names"]  # fmt: skip


def test_not_while_steps_are_launched(model, monkeypatch):
    session = captured(model)
    session.add([1, 2], 6)
    monkeypatch.setattr(type(session.loop), "is_idle", False)
    with (
        pytest.raises(step_module.NoStep, match="tokens nobody has read"),
        step_module.decode_step(session),
    ):
        pass


# -- what is made of a trace -----------------------------------------------------------------------

NAMES = ["embed", *["norm", "nvjet_qkv", "flash", "nvjet_o"] * 3, "norm", "nvjet_head", "argmax"]


@pytest.mark.parametrize(
    ("names", "num_layers", "expected"),
    [
        (NAMES, 3, Repeats(1, 4, 3)),
        (["a", "b", "b", "a", "b", "b", "c"], 4, Repeats(0, 3, 2)),  # one sequence for two layers
        (["a", "b", "c"], 3, None),
        (["a", "b"], 1, Repeats(0, 2, 1)),
        ([], 2, None),
    ],
)
def test_repeats(names, num_layers, expected):
    assert repeats(names, num_layers) == expected


def test_layers_of_repeats():
    found = Repeats(1, 4, 3)
    assert [found.layer_of(i, 3) for i in (0, 1, 4, 5, 12, 13)] == [None, 0, 0, 1, 2, None]
    assert [Repeats(0, 4, 2).layer_of(i, 4) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def kernels() -> list[Kernel]:
    return [Kernel(name, 10.0 * i, 8.0) for i, name in enumerate(NAMES)]


def test_rows_add_up():
    rows, number = rows_of(kernels(), 3)
    assert number == 3
    assert [row["layer"] for row in rows] == [None, *[0] * 4, *[1] * 4, *[2] * 4, None, None, None]
    assert [row["gap_us"] for row in rows] == [0.0, *[2.0] * 15]
    assert times_of(kernels()) == {"span_us": 158.0, "sum_us": 128.0, "gap_us": 30.0}
    for row in rows:
        row["bytes"] = 400 if row["group"] == group_of("nvjet") else None
    groups = groups_of(rows, 1e8)
    assert next(iter(groups)) == "products"
    assert groups["products"] == {
        "us": 56.0, "bytes": 2800, "share": pytest.approx(0.5), "num_kernels": 7,
    }  # fmt: skip
    assert sum(group["us"] for group in groups.values()) == 128.0
    assert groups["attention"]["share"] is None


def test_kernels_that_overlap_count_once():
    overlapping = [Kernel("a", 0, 10), Kernel("b", 4, 2), Kernel("c", 8, 6), Kernel("d", 20, 1)]
    assert idle_before(overlapping) == [0, 0, 0, 6]
    assert times_of(overlapping) == {"span_us": 21, "sum_us": 15, "gap_us": 6}


def test_a_kernel_that_is_launched_early_counts_from_the_end_of_those_before():
    """Of kernels by (begin, end): when each has the device for itself."""
    spans = [(0, 10), (4, 12), (5, 6), (11, 15), (20, 22)]
    kernels = in_turn([Kernel(str(i), a, b - a) for i, (a, b) in enumerate(spans)])
    assert [(k.start_us, k.us, k.early_us) for k in kernels] == [
        (0, 10, 0), (10, 2, 6), (6, 0, 1), (12, 3, 1), (20, 2, 0),
    ]  # fmt: skip
    times = times_of(kernels)
    assert sum(k.us for k in kernels) == times["sum_us"] == 17
    rows, _ = rows_of(kernels, 0)
    assert [row["early_us"] for row in rows] == [0, 6, 1, 1, 0]


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
    path.write_text("[]")
    with pytest.raises(ValueError, match="file must be a trace"):
        kernels_in(path, on_gpu=True)


def test_bytes_of_a_cache():
    """By hand: keys and values of 8 heads of 128, 2 bytes each."""
    spec = AttentionSpec(32, 8, 128, torch.bfloat16)
    assert token_bytes(spec) == 2 * 8 * 128 * 2
    assert cached_bytes(spec, 1000) == 1000 * 4096
    window = AttentionSpec(32, 8, 128, torch.bfloat16, sliding_window=100)
    assert (cached_bytes(window, 1000), cached_bytes(window, 10)) == (409600, 40960)
    chunk = AttentionSpec(32, 8, 128, torch.bfloat16, attention_chunk_size=100)
    assert (cached_bytes(chunk, 1000), cached_bytes(chunk, 1001)) == (409600, 4096)
    fp8 = AttentionSpec(32, 8, 128, torch.bfloat16, kv_cache_dtype="fp8_e4m3")
    assert cached_bytes(fp8, 1000) == 1000 * 2048
    blocks = AttentionSpec(32, 8, 128, torch.bfloat16, blocksparse=64)
    assert cached_bytes(blocks, 1000) is None
