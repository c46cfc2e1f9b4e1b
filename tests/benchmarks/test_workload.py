"""The benchmark of a whole workload: its run on a CPU, what it counts as idle."""

import json

import pytest
import torch

from benchmarks.workload import __main__ as workload
from benchmarks.workload.device_time import idle_share, intervals_of, ms_between, timed_launches
from benchmarks.workload.requests import SMALL, Workload, num_output_tokens
from tests.kit.marks import long, slow
from tests.kit.sessions import captured_lazily


@pytest.mark.parametrize("modes", [*long(["FULL_DECODE_ONLY"]), *slow([])], ids=["one", "all"])
def test_smoke_run_prints_and_writes_everything(tmp_path, capsys, modes):
    path = tmp_path / "figures.json"
    chosen = ["--modes", *modes] if modes else []
    arguments = ["--device", "cpu", "--layers", "1", "--rounds", "1", *chosen]
    workload.main([*arguments, "--json", str(path), "--commit", "none"])
    printed = capsys.readouterr().out
    for text in ("FULL_DECODE_ONLY", "Transformers"):
        assert text in printed
    rows = json.loads(path.read_text())["rows"]
    *ours, (_, other) = rows.items()
    assert len(ours) == (2 if modes else len(workload.RUNS))
    for name, row in ours:
        assert row["same tokens"] == 1.0
        assert row["idle"] is None  # no GPU
        if not name.startswith("NONE"):
            assert row["waited for"] == 1
        assert row["wall / GPU"] == pytest.approx(row["wall, s"] / row["GPU, s"])
    assert other["same tokens"] > 0.5


def test_the_workload_is_the_same_every_time():
    wishes = Workload().draw(1000)
    assert wishes == Workload().draw(1000)
    assert len(wishes) == 512
    assert {len(w.prompt) for w in wishes} <= set(range(32, 1025))
    assert {w.num_new for w in wishes} <= set(range(16, 513))
    assert 120_000 < num_output_tokens(wishes) < 145_000
    assert max(len(w.prompt) + w.num_new for w in SMALL.draw(9)) <= SMALL.max_tokens


def test_idle_is_what_no_interval_covers(tmp_path):
    intervals = [(1000.0, 1500.0), (0.0, 1000.0), (1400.0, 1450.0), (1750.0, 2000.0)]
    assert idle_share(intervals) == pytest.approx(0.125)
    trace = tmp_path / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "ts": 5.0, "dur": 2.0}
    events = [kernel, kernel | {"cat": "cuda_runtime"}, kernel | {"cat": "gpu_memcpy", "ts": 9.0}]
    trace.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "cat": "kernel"}]}))
    assert intervals_of(trace) == [(5.0, 7.0), (9.0, 11.0)]


def test_every_launch_is_timed(model):
    session = captured_lazily(
        model, decode_steps=4, max_tokens_per_step=8, cudagraph_mode="FULL_DECODE_ONLY"
    )
    with timed_launches(torch.device("cpu")) as found:
        session.generate([[1, 2], [3] * 20], 9)
    assert all(ms_between(*stamps) > 0 for stamps in found)
    assert len(found) == sum(session.loop.num_launches.values()) > 2
