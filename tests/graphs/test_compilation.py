"""Who compiles a session's model, and what a session says where no pass of ours runs."""

import logging
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fx_passes
from fx_passes.observe import recorders
from graphs import compilation
from graphs.compilation import Compilation, compilers
from tests.kit.sessions import make_session, uncaptured

NOT_COMPILED = "not compiled: the passes of attn_ops did not run"
BY_EAGER = "compiled by eager: the passes of attn_ops did not run"


@pytest.fixture(autouse=True)
def nothing_was_said():
    compilation._warn_once.cache_clear()


def refuse(gm, inputs):
    raise AssertionError("nothing is compiled here")


COMPILED = {
    "not at all": (lambda m: m, {}),
    "attn_ops": (lambda m: torch.compile(m, backend="attn_ops"), {"attn_ops": True}),
    "by function": (lambda m: torch.compile(m, backend=fx_passes.attn_ops), {"attn_ops": True}),
    "with options": (
        lambda m: torch.compile(m, backend="attn_ops", options={"fast_prefill": "off"}),
        {"attn_ops": True},
    ),
    "inductor": (torch.compile, {"inductor": False}),
    "inductor with our passes": (
        lambda m: torch.compile(m, options=fx_passes.options()),
        {"inductor": True},
    ),
    "eager": (lambda m: torch.compile(m, backend="eager"), {"eager": False}),
    "a function": (lambda m: torch.compile(m, backend=refuse), {"refuse": False}),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", COMPILED)
def test_who_compiles(case, in_place):
    """Nothing is compiled by asking. In place: `module.compile`, of a part of the model."""
    compile_it, wanted = COMPILED[case]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if in_place:
        model[1] = compile_it(model[1])
        assert compilers(model) == wanted
        return
    assert compilers(compile_it(model)) == wanted


def test_modules_compiled_in_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].compile(backend="eager")
    model[1].compile(backend="attn_ops")
    assert compilers(model) == {"eager": False, "attn_ops": True}


@pytest.mark.parametrize(
    ("compile_it", "why", "line"),
    [
        (lambda m: m, NOT_COMPILED, "compiled no"),
        (
            lambda m: torch.compile(m, backend="eager", fullgraph=True),
            BY_EAGER,
            "compiled by eager: ",
        ),
    ],
)
def test_sessions_say_that_no_pass_ran(model, caplog, compile_it, why, line):
    for _ in range(2):
        session = make_session(compile_it(model), max_batch_size=2)
        with caplog.at_level(logging.WARNING, "graphs"):
            session.generate([[1, 2, 3]], 2)
        report = session.report()
        assert (report.no_passes_why, report.matches) == (why, {})
        assert f"passes {why}" in " ".join(str(report).split())
        assert line in " ".join(str(report).split())
    advice = "torch.compile(model, backend='attn_ops') runs them"
    assert caplog.messages == [f"LlamaForCausalLM is {why}; {advice}"]


def test_who_asks_for_no_graphs_and_does_not_compile_is_not_told(model, caplog):
    with caplog.at_level(logging.WARNING, "graphs"):
        uncaptured(model).generate([[1]], 1)
    assert caplog.messages == []


def test_what_dynamo_cannot_trace(make_model, monkeypatch):
    model = make_model()
    forward = type(model).forward

    def broken(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", broken)
    session = make_session(torch.compile(model, backend="eager", fullgraph=True))
    line = broken.__code__.co_firstlineno + 1
    message = (
        "^model must be traceable by Dynamo with fullgraph=True, got LlamaForCausalLM: "
        f".*graph_break.*, at {re.escape(__file__)}:{line}; change that, use the model uncompiled, "
        "or compile it without fullgraph=True$"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            session.generate([[1]], 2)
    assert session.num_unfinished == 0
    whole = make_session(torch.compile(model, backend="eager"))
    assert whole.generate([[1]], 2) == make_session(model).generate([[1]], 2)


@pytest.mark.slow
def test_a_break_within_a_layer(make_model):
    """A piece after it begins with rows of a batch, whose number Dynamo takes for a constant."""
    model = make_model()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward

    def broken(x):
        torch._dynamo.graph_break()
        return forward(x)

    mlp.forward = broken
    session = make_session(torch.compile(model, backend="eager"))
    message = (
        "^model must be traceable by Dynamo in one piece, got LlamaForCausalLM: "
        ".*graph_break.*; use the model uncompiled, or compile it with fullgraph=True"
    )
    with pytest.raises(ValueError, match=message):
        session.generate([[1]], 2)
    assert session.num_unfinished == 0
    torch._dynamo.reset()
    del mlp.forward
    whole = make_session(torch.compile(model, backend="eager"))
    assert whole.generate([[1]], 2) == make_session(model).generate([[1]], 2)


@pytest.mark.slow
def test_a_model_that_is_compiled_too_often(make_model):
    model = make_model()
    session = make_session(torch.compile(model, backend="eager", fullgraph=True))
    with torch._dynamo.config.patch(recompile_limit=2):
        session.generate([[1, 2]], 2)
        with pytest.raises(ValueError, match=r"^model must be traceable .* than recompile_limit"):
            change_often(model, session)


def change_often(model, session):
    for _ in range(4):
        model.model.layers[0].self_attn.scaling *= 2
        session.generate([[1, 2]], 2)


def test_what_dynamo_cannot_trace_later(make_model, monkeypatch):
    """A change that compiles anew, and breaks the graph: refused, and undone by undoing it."""
    model = make_model()
    forward = type(model).forward

    def breaks(self, *args, **kwargs):
        if self.config.breaks:
            torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", breaks)
    model.config.breaks = False
    session = make_session(torch.compile(model, backend="eager", fullgraph=True))
    before = session.generate([[1, 2]], 3)
    request = session.add([1, 2], 3)
    session.step()
    model.config.breaks = True
    with pytest.raises(ValueError, match=r"^model must be traceable by Dynamo .*graph_break"):
        session.generate([[1]], 3)
    model.config.breaks = False
    while session.num_unfinished:
        session.step()
    assert session.result(request) == before[0]
    assert session.generate([[1, 2]], 3) == before


def test_an_attempt_that_failed_counts_for_nothing():
    class Runner:
        model, batch_invariant = nn.Linear(2, 2), False

        def compile(self, first_call):
            counters["stats"]["unique_graphs"] += 1
            counters["graph_break"]["a reason"] += 1
            for recorder in recorders():
                recorder.passes.append("a run of a pass")
            self.attempts = getattr(self, "attempts", 0) + 1
            if self.attempts == 1:
                raise fx_passes.PassError("the pass 'x' failed")
            return 0.5

    runner = Runner()
    compiled = Compilation(runner, runner, warns_uncompiled=False)
    with pytest.raises(fx_passes.PassError):
        compiled.run()
    compiled.run()
    assert len(compiled.record.passes) == 1
    assert (compiled.counters.num_graphs, compiled.counters.num_breaks) == (1, 1)
    assert compiled.seconds == 0.5


def test_caches_of_another_size(make_model):
    """A second session on a compiled model compiles nothing, and layers are equal all the same."""
    torch._dynamo.reset()
    compiled = torch.compile(make_model("llama"), backend="attn_ops", fullgraph=True)
    before, found = counters["stats"]["unique_graphs"], []
    for tokens in (256, 512, 128):
        session = make_session(compiled, cache_tokens=tokens)
        found.append([g.token_ids for g in session.generate([[1, 2, 3]], 4)])
        assert session.counters.num_recompiles == 0
        assert counters["stats"]["unique_graphs"] == before + 1
        if tokens == 256:
            assert session.compile_record.matches()["outline_layers"] == 2
    assert found[0] == found[1] == found[2]
