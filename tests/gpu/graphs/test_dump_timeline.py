"""The timeline of a captured decode step on a GPU: times that add up, bytes counted by hand."""

import json

import pytest
import torch

import fx_passes
import graphs
from attn_ops.integrations.merged import merge_projections
from graphs.dumps.data import read
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
def timeline(dumped):
    data = read(dumped[0])
    assert data["timeline"] is not None, (data["timeline_why"], data["index"]["notes"])
    return data["timeline"]


def rows(timeline, group):
    return [row for row in timeline["kernels"] if row["group"] == group]


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
    grouped = sum(group["us"] for group in timeline["groups"].values())
    assert grouped == pytest.approx(sum(row["us"] for row in timeline["kernels"]), rel=1e-3)


def test_layers_are_found(timeline):
    assert timeline["num_layers"] == LAYERS
    attention = {row["layer"] for row in rows(timeline, "attention")}
    assert set(range(LAYERS)) <= attention


def test_bytes_of_products(timeline):
    """Weights once; merged or not, every product reads its rows and writes its results."""
    assert timeline["notes"] == []
    width = (HEADS + 2 * KV_HEADS) * SIZE
    weights = LAYERS * (HIDDEN * width + HEADS * SIZE * HIDDEN + 3 * HIDDEN * MLP)
    weights = 2 * (weights + HIDDEN * VOCAB)
    found = sum(row["bytes"] or 0 for row in rows(timeline, "products"))
    widest = LAYERS * (5 * HIDDEN + HEADS * SIZE + width + HIDDEN + 3 * MLP + HIDDEN)
    rows_moved = 2 * BATCH * (widest + HIDDEN + VOCAB)
    assert weights < found <= (weights + rows_moved) * 1.001  # a kernel may read a norm's weight


def test_bytes_of_attention_and_of_writes(timeline):
    """Keys and values of all cached tokens, q and the output; a token's keys and values."""
    token = 2 * KV_HEADS * SIZE * 2
    expected = BATCH * (timeline["seq_len"] * token + 2 * HEADS * SIZE * 2)
    by_layer: dict[int, int] = {}
    for row in rows(timeline, "attention"):
        if row["bytes"] is not None and row["layer"] is not None:
            by_layer[row["layer"]] = by_layer.get(row["layer"], 0) + row["bytes"]
    assert by_layer == dict.fromkeys(range(LAYERS), expected)
    writes = rows(timeline, "KV write")
    assert len(writes) >= LAYERS
    assert all(row["detail"] == f"{BATCH * token} bytes into the layer's cache" for row in writes)
    moved = sum(row["bytes"] for row in writes if row["bytes"] is not None)
    assert moved >= LAYERS * BATCH * token


def test_shares_are_of_a_measured_copy(timeline):
    assert "a copy of" in timeline["bandwidth_from"]
    properties = torch.cuda.get_device_properties(0)
    assert timeline["bandwidth"] > 1e11, properties.name
    for row in rows(timeline, "products"):
        if row["share"] is not None:
            assert 0 < row["share"] < 1.5  # weights of a small model stay in the L2 cache in part


def test_the_trace_loads(dumped, timeline):
    trace = json.loads((dumped[0] / timeline["trace"]).read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert len(names) == sum(not n["name"].startswith("Mem") for n in timeline["kernels"])


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
def test_other_modes(make_model, tmp_path, mode):
    compiled = torch.compile(cases.wide(make_model), backend=fx_passes.attn_ops, fullgraph=True)
    session = graphs.DecodeSession(compiled, cudagraph_mode=mode, **cases.SMALL)
    with graphs.dump(tmp_path) as directory:
        expected = session.generate(PROMPTS[:3], 6)
    data = read(directory)
    assert data["timeline"] is not None, (data["timeline_why"], data["index"]["notes"])
    assert data["timeline"]["kernels"]
    assert session.generate(PROMPTS[:3], 6) == expected


def test_a_function_that_is_profiled(tmp_path):
    """Kernels of the GPU, and about the time that events measure."""
    x, w = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    function = torch.compile(lambda: torch.relu(x @ w), options=fx_passes.options())
    with graphs.dump(tmp_path, profile=function) as directory:
        pass
    data = read(directory)
    timeline = data["timeline"]
    assert timeline is not None, (data["timeline_why"], data["index"]["notes"])
    assert (timeline["kind"], timeline["device"]) == ("profile", "cuda")
    assert {row["group"] for row in timeline["kernels"]} >= {"products"}
    assert timeline["sum_us"] <= timeline["replay_us"] * 1.5
    assert timeline["bandwidth"] > 1e11
    assert (directory / "index.html").is_file()
