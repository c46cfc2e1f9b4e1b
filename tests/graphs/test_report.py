"""What `session.report()` says: on a CPU, where a graph runs its step's Python again."""

import dataclasses
import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from attn_ops import get_backend
from attn_ops.backends.grouped import grouped_backend
from graphs import BatchDescriptor, CUDAGraphMode, DecodeSession
from graphs.capture.failures import CaptureError, Failure
from graphs.capture.memory import NODE_BYTES
from graphs.capture.plan import resolve
from graphs.report import FailureLine, SessionReport
from tests.kit.sessions import captured

PROMPTS = [[3], [5, 9], list(range(1, 18))]


KEYS = [BatchDescriptor(n, n, uniform=True) for n in (1, 2)]


def used(report: SessionReport) -> tuple[int, int | None]:
    return report.decode_steps.asked, report.decode_steps.used


def one_line(report: SessionReport) -> str:
    return " ".join(str(report).split())


def test_a_session_without_graphs(model):
    session = captured(model, debug=None, decode_steps=8)
    report = session.report()
    assert (report.model, report.device, report.backend) == ("LlamaForCausalLM", "cpu", "TORCH")
    assert (report.mode_asked, report.mode_used) == ("FULL_DECODE_ONLY", "NONE")
    assert report.mode_why == "the model is on cpu; CUDA graphs need a model on cuda"
    assert report.levels == {"TORCH": "NEVER"}
    assert (report.mode_in_words, report.kinds) == (f"none: {report.mode_why}", [])
    assert (report.graphs, report.failures, report.num_keys) == ([], [], 0)
    assert (report.graph_bytes, report.graph_bytes_estimated) == (0, None)
    assert used(report) == (8, 1)
    assert report.decode_steps.why == f"no decode step is captured: {report.mode_why}"
    assert (report.verify, report.num_verified) == (None, 0)
    session.generate(PROMPTS, 4)
    assert session.report().num_steps == session.num_steps
    assert session.report().num_steps["called"] > 3
    assert "captured nothing" in one_line(report)
    assert report.num_steps == {"captured": 0, "called": 0}  # as it was at the call


def test_asked_for(model):
    report = captured(model, debug=None, cudagraph_mode="NONE").report()
    assert (report.mode_used, report.mode_why) == ("NONE", "asked for")
    assert report.decode_steps.why == "asked for"
    assert "CUDA graphs NONE, asked for decode batches: NONE" in one_line(report)
    assert "decode steps 1 steps" in one_line(report)


def test_a_mode_that_is_asked_for_says_what_came_of_it(model):
    report = captured(model, debug=None, cudagraph_mode="FULL_DECODE_ONLY", decode_steps=8).report()
    why = "the model is on cpu; CUDA graphs need a model on cuda"
    assert report.mode_in_words == f"FULL_DECODE_ONLY asked for, NONE used: {why}"
    assert report.kinds == [
        "decode batches: FULL asked for, NONE used",
        "mixed batches: NONE",
    ]
    assert "decode steps 8 asked for, 1 used: no decode step is captured" in one_line(report)


def test_captured_keys_and_replays(model):
    session = captured(
        model,
        cudagraph_mode="FULL_AND_PIECEWISE",
        decode_steps=4,
        num_draft_tokens=2,
        mixed_capture_sizes=[32],
    )
    before = session.report()
    assert (before.graphs, before.num_keys, used(before)) == ([], 7, (4, None))
    assert "not known yet: no decode step has been captured yet" in one_line(before)
    session.generate(PROMPTS, 9)
    session.generate(PROMPTS[:1], 9, temperature=1.0)
    report = session.report()
    graphs = {(g.batch, g.sampling): g for g in report.graphs}
    assert [g.mode for g in report.graphs[:2]] == ["PIECEWISE", "FULL"]  # the largest first
    assert graphs["mixed 32 tokens, 5 requests", "GREEDY"].needs_host
    decode = graphs["decode 4", "GREEDY"]
    assert (decode.num_tokens, decode.num_reqs, decode.uniform) == (4, 4, True)
    assert (decode.mode, decode.needs_host, decode.num_replays) == ("FULL", False, 8)
    assert decode.seconds > 0
    assert graphs["uniform 2 x 3", "GREEDY"].num_replays == 0
    assert graphs["decode 1", "RANDOM"].num_replays == 9  # its prompt is one token
    assert sum(g.num_replays for g in report.graphs) == session.num_steps["captured"]
    assert report.num_keys == len(report.graphs) == 8  # one of another sampling
    assert report.capture_seconds == pytest.approx(sum(g.seconds for g in report.graphs))
    assert used(report) == (4, 4)
    assert report.mode_why.startswith("debug='eager_replay'")
    assert report.kinds == [
        "decode batches: FULL",
        "uniform batches of 3 tokens a request: FULL",
        "mixed batches: PIECEWISE, between graphs: TORCH",
    ]


def test_released(model):
    session = captured(model, decode_steps=2)
    session.generate(PROMPTS, 4)
    session.release()
    report = session.report()
    assert (report.mode_used, report.mode_why) == ("NONE", "release() was called")
    assert report.kinds[0] == "decode batches: FULL asked for, NONE used"
    assert (report.graphs, report.num_keys, used(report)) == ([], 0, (2, 1))


def test_failures(model):
    """The key, the operator and the line; the other keys go on without the host."""
    session = captured(
        model, cudagraph_mode="FULL_DECODE_ONLY", on_capture_failure="continue", decode_steps=4
    )
    graphs = session.graphs
    assert graphs is not None
    recorder: Any = graphs.recorders[CUDAGraphMode.FULL]
    record = recorder.record

    def refuse(step, metadata):
        if len(graphs) == 0 and not graphs.failures:
            torch.zeros(1).view(2)
        return record(step, metadata)

    recorder.record = refuse
    session.generate(PROMPTS, 4)
    report = session.report()
    (failure,) = report.failures
    assert (failure.batch, failure.operator) == ("decode 4", "aten::view")
    assert "in refuse: `torch.zeros(1).view(2)`" in failure.line
    assert failure.cause.startswith("RuntimeError: shape '[2]' is invalid")
    assert [g.batch for g in report.graphs] == ["decode 2", "decode 1"]
    assert used(report) == (4, 4)
    assert report.decode_steps.why.endswith("1 for decode 4, whose capture failed")
    assert "not decode 4 aten::view at " in one_line(report)
    little = CaptureError("key", Failure.HOST_SYNC, None, "", "RuntimeError: [bold]x")
    assert str(FailureLine.of(KEYS[0], little)) == "an error: HOST_SYNC, RuntimeError: [bold]x"
    graphs.failures.update(dict.fromkeys(KEYS, little))
    assert used(session.report()) == (4, 1)
    assert session.report().decode_steps.why == "no decode step could be captured"


@pytest.mark.parametrize(
    ("options", "plans", "why"),
    [
        ({"verify": "always"}, False, "verify compares single steps"),
        ({"cudagraph_mode": "PIECEWISE"}, False, "attention between graphs is planned by the host"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, True, "TORCH plans every replay on the host"),
    ],
)
def test_decode_steps_that_need_the_host(model, options, plans, why):
    session = captured(model, decode_steps=4, **options)
    if plans:
        session.builder.prepare_capture = lambda common: session.builder.build(0, common)
    session.generate(PROMPTS, 4)
    report = session.report()
    assert used(report) == (4, 1)
    assert report.decode_steps.why == why
    assert any(g.needs_host for g in report.graphs) == ("verify" not in options)
    if "verify" in options:
        assert (report.verify, report.num_verified) == ("always", session.num_steps["captured"])
        compared = f"{report.num_verified} replays compared with calls (verify=always)"
        assert compared in one_line(report)


def test_batches_beyond_the_largest_graph(model):
    session = captured(
        model,
        cudagraph_mode="FULL_DECODE_ONLY",
        decode_steps=4,
        capture_sizes=[1, 2],
        lazy_capture=True,
    )
    assert session.report().decode_steps.why == (
        "no decode step has been captured yet; 1 for more than 2 requests"
    )
    session.generate(PROMPTS[:1], 4)
    report = session.report()
    assert [g.batch for g in report.graphs] == ["decode 1"]
    assert report.num_keys == 2
    assert report.decode_steps.why == "no decode graph needs the host; 1 for more than 2 requests"


def on_a_gpu(session: DecodeSession) -> None:
    """Its plan as one that captures, with levels of which the model's backend is too weak."""
    levels = {
        "TRITON": get_backend("TRITON").support.cudagraph,
        "TORCH": get_backend("TORCH").support.cudagraph,
    }
    found = resolve(session.plan.asked, levels, "cuda")
    options = dataclasses.replace(session.plan.options, debug=None)
    plan = dataclasses.replace(session.plan, resolution=found, options=options)
    plan.dispatcher.initialize_keys(found.decode_modes, found.mixed_mode)
    session.plan = plan


def test_a_weak_group_and_the_estimate(model):
    session = captured(model, cudagraph_mode="FULL_DECODE_ONLY", decode_steps=4)
    on_a_gpu(session)
    report = session.report()
    assert (report.mode_asked, report.mode_used) == ("FULL_DECODE_ONLY", "PIECEWISE")
    assert report.levels == {"TRITON": "ALWAYS", "TORCH": "NEVER"}
    assert report.kinds[0] == (
        "decode batches: FULL asked for, PIECEWISE used, between graphs: TORCH"
    )
    assert "TORCH has level NEVER and runs between graphs" in report.mode_why
    assert used(report) == (4, 1)
    layer, logits = 4 * (3 * 64 + 3 * 96) * 4, 4 * 64 * 12
    nodes = 3 * 2 * 30 * NODE_BYTES  # three sizes, two layers
    assert report.graph_bytes_estimated == layer * 3 // 2 + logits + nodes
    assert "0 graphs, 0 B (estimated 1.4 MiB), 0.00 s, of 3 keys" in one_line(report)


def test_debugging_reports_every_kind_as_it_runs(make_model):
    """Decodes are lowered to PIECEWISE; mixed batches are not captured, as nobody asked for it."""
    sliding = grouped_backend({(lambda s: s.sliding_window is not None): "TORCH"}, default="FLEX")
    session = captured(make_model("gemma2"), backend=sliding, max_tokens=32)
    report = session.report()
    assert (report.mode_asked, report.mode_used) == ("FULL_DECODE_ONLY", "PIECEWISE")
    assert report.kinds == [
        "decode batches: FULL asked for, PIECEWISE used, between graphs: FLEX, TORCH",
        "mixed batches: NONE",
    ]
    session.generate([[1, 2, 3]], 3)
    assert session.num_steps == {"captured": 2, "called": 1}


def test_no_estimate_for_a_model_of_unknown_shape(make_model, monkeypatch):
    model = make_model()
    monkeypatch.setitem(vars(model.config), "intermediate_size", [96, 128])  # one a layer
    session = captured(model)
    on_a_gpu(session)
    assert session.report().graph_bytes_estimated is None


def test_json_and_text(model):
    session = captured(model, cudagraph_mode="FULL", verify=3)
    session.generate(PROMPTS, 4, temperature=0.5)
    report = session.report()
    again = json.loads(json.dumps(report.as_dict()))
    assert again == report.as_dict()
    assert again["graphs"][0]["sampling"] == "GREEDY"
    console = Console(file=io.StringIO(), width=60)  # markup is on
    console.print(dataclasses.replace(report, backend_why="[bold]why[/bold]"))
    assert "[bold]why[/bold]" in console.file.getvalue()
    assert max(map(len, str(report).splitlines())) <= 120
    for text in ("FULL asked for, FULL used", "decode 4 random FULL 0 B", "(verify=3)"):
        assert text in one_line(report)
