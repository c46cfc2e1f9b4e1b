"""The benchmark of captured steps: its run on a CPU, and what it counts as waiting."""

import dataclasses
import json
import time
import types
from typing import Any, cast

import pytest
import torch

from benchmarks import decode_step, graphs
from benchmarks.graphs import Lengths, measure_case, place, watched_waits
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession
from graphs.launcher import LaunchedSteps

LENGTHS = Lengths(context=30, warm=8, timed=16, repeats=4, rounds=1)


@pytest.fixture
def make_session(make_model):
    def session(**options):
        defaults = {
            "max_batch_size": 3, "max_tokens": LENGTHS.longest(8), "block_size": 4,
            "debug": "eager_replay", "lazy_capture": True,
        }  # fmt: skip
        return DecodeSession(make_model("llama"), **(defaults | options))

    return session


@pytest.mark.slow
def test_smoke_run_prints_and_writes_everything(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--layers", "1", "--context", "40"]
    graphs.main([*arguments, "--cases", "3", "1", "--json", str(path)])
    printed = capsys.readouterr().out
    for text in ("PIECEWISE", "address check"):
        assert text in printed
    result = json.loads(path.read_text())
    assert list(result["rows"]) == [
        f"{mode}, batch {batch}, decode_steps {steps}"
        for mode, steps in graphs.RUNS
        for batch in (1, 3)
    ]
    for row in result["rows"].values():
        assert row["replay, ms"] > 0
        assert row["host busy"] == pytest.approx(1.0)  # nothing to wait for
    assert CUDAGraphMode.FULL.decode_mode() is CUDAGraphMode.FULL_DECODE_ONLY.decode_mode()
    assert [c["graphs"] for c in result["captures"].values()] == [2, 2, 3, 2]


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_timed_steps_are_replays_at_the_wanted_lengths(make_session, monkeypatch, mode):
    """Their mean is `context`; those of bare replays lie around it too, or are it."""
    session = make_session(cudagraph_mode=mode)
    launch, lengths, marks = session.runner.launch, [], []

    def watched(captured, num_steps=1):
        for _ in range(num_steps):
            lengths.append(captured.tensors.device["seq_lens"].tolist())
            launch(captured)

    def interval(run, repeats, device):
        for _ in range(repeats):
            marks.append(captured.tensors.device["seq_lens"].tolist())
            run()
        return 1.0

    monkeypatch.setattr(session.runner, "launch", watched)
    monkeypatch.setattr(graphs, "interval_ms", interval)
    runtime = session.graph_mode.decode_mode()
    session.warm_up()
    captured = session.graphs.get(BatchDescriptor(3, 3, uniform=True), runtime)
    row = measure_case(session, 3, LENGTHS)
    steps = lengths[:-1]  # the last one plans the bare replays
    assert steps == [[LENGTHS.prompt + i] * 3 for i in range(LENGTHS.new_tokens(1))]
    timed = [n for n, *_ in steps[LENGTHS.warm :][: LENGTHS.timed]]
    assert round(sum(timed) / len(timed)) == pytest.approx(LENGTHS.context, abs=1)
    grown = [28, 29, 30, 31] if mode == "FULL_DECODE_ONLY" else [30] * 4
    assert marks == [[n] * 3 for n in grown]
    assert row["replay, ms"] == 1.0
    assert row["gap, us"] == pytest.approx(1000 * row["per token, ms"] - 1000)
    assert session.num_unfinished == 0
    assert session.num_steps["called"] == 0


def test_a_session_goes_on_after_bare_replays(make_session):
    """They leave nothing that its next step would take for its own."""
    session, other = make_session(decode_steps=4), make_session(decode_steps=4)
    measure_case(session, 2, LENGTHS)
    prompts = [[3, 4], [5, 6, 7]]
    assert session.generate(prompts, 9) == other.generate(prompts, 9)


def test_waits_are_counted_and_nothing_else():
    event = types.SimpleNamespace(synchronize=lambda: time.sleep(0.02))
    nobody: Any = [None, None]
    tokens = torch.tensor([[7, 8]])
    launched = LaunchedSteps(None, nobody, 0, 1, 0, tokens, tokens, None, cast(Any, event))
    with watched_waits() as waits:
        assert launched.wait() == [[7, 8]]
        before = sum(waits)
        dataclasses.replace(launched, arrived=None).wait()
    launched.wait()
    assert 0.02 <= before == sum(waits) < 0.2


def test_placed_requests_write_behind_their_tokens(make_session):
    session = make_session()
    session.warm_up()
    captured = session.graphs.get(BatchDescriptor(2, 2, uniform=True), CUDAGraphMode.FULL)
    captured.tensors.host["block_table"][:, 2] = torch.tensor([5, 9])
    place(captured, 11, 4, True)
    device = captured.tensors.device
    assert device["slot_mapping"].tolist() == [5 * 4 + 2, 9 * 4 + 2]
    assert device["position_ids"].tolist() == [[10, 10]]
    assert device["seq_lens"].tolist() == [11, 11]
    assert device["active"].tolist() == [True, True]


def test_a_context_that_is_too_short():
    with pytest.raises(ValueError, match="context must be more than 48 tokens"):
        Lengths(48)
    assert Lengths(49).prompt == 1


def test_decode_step_times_a_graph_that_stays_where_it_is(make_session, monkeypatch):
    """Replays of `benchmarks.decode_step` leave the lengths as they are."""
    session = make_session()
    session.warm_up()
    monkeypatch.setattr(decode_step, "median_ms", lambda run: [run() for _ in range(3)] and 5.0)
    assert decode_step.ours_ms(session, 2, 20) == 5.0
    captured = decode_step.decode_graph(session, 2)
    assert captured.num_replays == 3
    assert captured.tensors.device["seq_lens"].tolist() == [20, 20]
