"""The timeline of a captured decode step on a GPU: times that add up, bytes counted by hand."""

import json

import pytest
import torch

import fx_passes
import graphs
from attn_ops.integrations.merged import merge_projections
from graphs.dumps.page import whole
from tests.gpu import graph_cases as cases

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, SIZE, VOCAB = 4, 2048, 8192, 16, 8, 128, 32000
BATCH, LENGTH = 16, 1024
PROMPTS = [[i + 1] * (5 + i) for i in range(BATCH)]


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "merged"])
def dumped(tmp_path_factory, make_model, request):
    """Steps long enough that a launch is small beside them; merged, norms and gates are fused."""
    model = cases.wide(
        make_model,
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        vocab_size=VOCAB,
    )
    if request.param:
        merge_projections(model)
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = graphs.DecodeSession(
        compiled, max_batch_size=BATCH, max_tokens=LENGTH, capture_sizes=[BATCH]
    )
    with graphs.dump(tmp_path_factory.mktemp("timeline")) as directory:
        first = session.generate(PROMPTS, 8)
        caches = [cache[1:].clone() for cache in session.cache.tensors]
    same = all(
        torch.equal(before, after[1:])
        for before, after in zip(caches, session.cache.tensors, strict=True)
    )
    return directory, session, same, first, session.generate(PROMPTS, 8)


@pytest.fixture(scope="module")
def page(dumped):
    data = whole(dumped[0])
    assert data["timeline"] is not None, (data["timeline_why"], data["index"]["notes"])
    return data


@pytest.fixture(scope="module")
def timeline(page):
    return page["timeline"]


def calls(page, group):
    """Calls of a group in the recorded step, with how often each runs."""
    found = []
    for one in page["timeline"]["calls"]:
        call = page["kernels"][one["graph"]]["calls"][one["call"]] if one["graph"] >= 0 else None
        found += [one] if call and call["group"] == group else []
    return found


def test_the_session_does_not_notice(dumped):
    _, _, same, first, second = dumped
    assert same, "only the null block may change"
    assert first == second


def test_times_add_up_to_the_replay(timeline):
    assert timeline["kind"] == "replay"
    assert timeline["num_reqs"] == BATCH
    assert timeline["span_us"] == pytest.approx(timeline["replay_us"], rel=0.05)
    total = timeline["sum_us"] + timeline["gap_us"]
    assert total == pytest.approx(timeline["span_us"], abs=0.1)
    assert sum(row[1] for row in timeline["rows"]) == pytest.approx(timeline["sum_us"], rel=1e-3)


def test_kernels_are_assigned(page):
    """To calls, and to layers: each has its attention, and Inductor's kernels are all found."""
    names, codes = page["timeline"]["names"], page["kernels"]
    for _, _, name, graph, call, _ in page["timeline"]["rows"]:
        if names[name].startswith("triton_"):
            assert codes[graph]["calls"][call]["name"] == names[name]
    assert sum(one["num"] for one in calls(page, "attention")) == LAYERS
    assert {row[5] for row in page["timeline"]["rows"]} >= set(range(1, LAYERS + 1))


def test_bytes_of_products(page):
    """Weights once; merged or not, every product reads its rows and writes its results."""
    width = (HEADS + 2 * KV_HEADS) * SIZE
    weights = LAYERS * (HIDDEN * width + HEADS * SIZE * HIDDEN + 3 * HIDDEN * MLP)
    weights = 2 * (weights + HIDDEN * VOCAB)
    found = sum(one["num"] * one["bytes"] for one in calls(page, "products"))
    widest = LAYERS * (5 * HIDDEN + HEADS * SIZE + width + HIDDEN + 3 * MLP + HIDDEN)
    rows_moved = 2 * BATCH * (widest + HIDDEN + VOCAB)
    assert weights < found <= (weights + rows_moved) * 1.001  # a kernel may read a norm's weight


def test_bytes_of_attention_and_of_writes(page):
    """Keys and values of all cached tokens, q and the output; a token's keys and values."""
    token = 2 * KV_HEADS * SIZE * 2
    expected = BATCH * (page["timeline"]["seq_len"] * token + 2 * HEADS * SIZE * 2)
    assert {one["bytes"] for one in calls(page, "attention")} == {expected}
    writes = calls(page, "KV write")
    assert sum(one["num"] for one in writes) >= LAYERS
    assert sum(one["num"] * one["bytes"] for one in writes) >= LAYERS * BATCH * token


def test_shares_are_of_a_measured_copy(page, timeline):
    assert "a copy of" in timeline["bandwidth_from"]
    properties = torch.cuda.get_device_properties(0)
    assert timeline["bandwidth"] > 1e11, properties.name
    for one in calls(page, "products"):
        assert (
            0 < one["of_bandwidth"] < 1.5
        )  # weights of a small model stay in the L2 cache in part


def test_the_trace_loads(dumped, timeline):
    trace = json.loads((dumped[0] / timeline["trace"]).read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    ran = [timeline["names"][row[2]] for row in timeline["rows"]]
    assert len(names) == sum(not name.startswith("Mem") for name in ran)


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
def test_other_modes(make_model, tmp_path, mode):
    compiled = torch.compile(cases.wide(make_model), backend=fx_passes.attn_ops, fullgraph=True)
    session = graphs.DecodeSession(compiled, **(cases.SMALL | {"cudagraph_mode": mode}))
    with graphs.dump(tmp_path) as directory:
        expected = session.generate(PROMPTS[:3], 6)
    data = whole(directory)
    assert data["timeline"] is not None, (data["timeline_why"], data["index"]["notes"])
    assert data["timeline"]["rows"]
    assert session.generate(PROMPTS[:3], 6) == expected


def test_a_function_that_is_profiled(tmp_path):
    """Kernels of the GPU, and about the time that events measure."""
    x, w = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    function = torch.compile(lambda: torch.relu(x @ w), options=fx_passes.options())
    with graphs.dump(tmp_path, profile=function) as directory:
        pass
    data = whole(directory)
    timeline = data["timeline"]
    assert timeline is not None, (data["timeline_why"], data["index"]["notes"])
    assert (timeline["kind"], timeline["device"]) == ("profile", "cuda")
    assert calls(data, "products")
    assert timeline["sum_us"] <= timeline["replay_us"] * 1.5
    assert timeline["bandwidth"] > 1e11
    assert (directory / "index.html").is_file()
