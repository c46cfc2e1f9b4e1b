"""Pieces in two forms: which steps take which, and what reports and files have of them."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fx_passes
from attn_ops.integrations.merged import merge_projections
from fx_passes import Recorder, recording
from fx_passes.forms import calls, config_of_replays, forms_of, replayed, with_forms
from graphs import DecodeSession, dump
from graphs.capture.recorder import Step
from tests.kit.marks import long, slow

REPLAYS = {"fused_mlp": "replays", "norm_products": "replays"}
PROMPTS = [[1, 2, 3], [4, 5], [6]]
FUSED = ("attn_ops.norm_mm", "attn_ops.gated_mlp")
X = torch.randn(3, 8)


def merged(make_model, family="llama"):
    torch._dynamo.reset()
    model = make_model(family)
    merge_projections(model)
    return model


def session_of(model, options=REPLAYS, **more):
    compiled = torch.compile(model, backend="attn_ops", fullgraph=True, options=options)
    return DecodeSession(compiled, max_batch_size=4, max_tokens=64, **more)


def tokens(session):
    return [g.token_ids for g in session.generate(PROMPTS, 12)]


@pytest.fixture(params=["fx_passes.backend"])
def taken(monkeypatch, request):
    """The forms that pieces took, those that a module puts together: True of replays."""
    found = []

    def watched(called, other):
        def noted(form, is_replay):
            def run(*args):
                found.append(is_replay)
                return form(*args)

            return run

        return with_forms(noted(called, False), other and noted(other, True))

    monkeypatch.setattr(f"{request.param}.with_forms", watched)
    return found


def test_each_call_takes_the_form_that_it_wants():
    both = with_forms(lambda x: x + 1, lambda x: x + 2)
    assert [form(1) for form in forms_of(both)] == [2, 3]
    assert both(1) == 2
    with replayed():
        assert both(1) == 3
    with pytest.raises(KeyError), replayed():
        raise KeyError
    assert both(1) == 2
    assert with_forms(len, None) is len
    assert forms_of(len) == (len,)


def test_which_configs_have_two():
    one = fx_passes.PassConfig(fused_mlp="replays")
    assert config_of_replays(one, ()) == fx_passes.PassConfig(fused_mlp="always")
    assert config_of_replays(fx_passes.PassConfig(norm_products="always"), ()) is None
    with pytest.raises(ValueError, match="'auto', 'replays', 'always' or 'never', got 'replay'"):
        fx_passes.PassConfig(norm_products="replay")  # pyright: ignore


@pytest.mark.parametrize("captures", [True, False])
def test_by_default_where_steps_are_captured(monkeypatch, captures):
    """And where there are kernels for a weight: none here."""
    config, weight = fx_passes.PassConfig(), torch.zeros(64, 128, dtype=torch.bfloat16)
    with calls(captures=captures):
        assert config_of_replays(config, (weight,)) is None
        monkeypatch.setattr("fx_passes.forms.takes_fused", lambda w, device: w.shape == (128, 64))
        found = config_of_replays(config, (weight[0], 3, weight))
        assert config_of_replays(config, (weight.t(),)) is None
        never = fx_passes.PassConfig(fused_mlp="never", norm_products="never")
        assert config_of_replays(never, (weight,)) is None
    both = fx_passes.PassConfig(fused_mlp="always", norm_products="always")
    assert found == (both if captures else None)


@pytest.mark.parametrize("options", [{"debug": "eager_replay"}, {"cudagraph_mode": "NONE"}])
def test_sessions_say_whether_they_capture(make_model, monkeypatch, options):
    monkeypatch.setattr("fx_passes.forms.takes_fused", lambda w, device: True)
    session = session_of(merged(make_model), {}, **options)
    tokens(session)
    matches = session.compile_record.matches()
    assert [matches[name] for name in REPLAYS] == [int("debug" in options)] * 2


@pytest.mark.parametrize(
    ("family", "outlined"), [("llama", True), *slow(("llama", False), ("qwen3", True))]
)
def test_replays_take_theirs(make_model, taken, family, outlined):
    """Called steps the other; one graph of Dynamo, no recompilation, and the tokens stay."""
    want = tokens(DecodeSession(make_model(family), max_batch_size=4, max_tokens=64))
    before = counters["stats"]["unique_graphs"]
    options = {**REPLAYS, "outline_layers": outlined}
    session = session_of(merged(make_model, family), options, debug="eager_replay", verify="always")
    taken.clear()
    assert tokens(session) == want
    assert set(taken) == {True, False}
    assert session.verifier is not None
    assert session.verifier.num_checked == session.num_steps["captured"] > 0
    assert counters["stats"]["unique_graphs"] == before + 1
    assert session.counters.num_recompiles == 0


@pytest.mark.slow
def test_what_is_not_captured_is_called(make_model, taken):
    session = session_of(merged(make_model), cudagraph_mode="NONE")
    tokens(session)
    assert taken
    assert not any(taken)


@pytest.mark.slow
def test_timed_calls_are_calls(make_model, taken):
    session = session_of(merged(make_model), debug="eager_replay")
    session.warm_up()
    step: Step = next(iter(session.graphs)).step
    for run, wanted in ((step.run, True), (step.call, False)):
        taken.clear()
        run(session.builder.prepare_capture(step.common_on_host()))
        assert set(taken) == {wanted}


def test_reports_and_graphs(make_model):
    """Only what is fused is told twice; pieces that nothing fuses have one form."""
    with recording(Recorder(texts=True)) as recorder:
        session = session_of(merged(make_model))
        tokens(session)
    matches = recorder.matches_in_words()
    assert matches["fused_mlp"] == matches["norm_products"] == "1 x 2 layers"
    alone = [record for record in recorder.passes if record.graph_name.endswith(", replayed")]
    assert {record.pass_name for record in alone} == {"fused_mlp", "norm_products"}
    graphs = dict(recorder.final_graphs)
    assert len(graphs) == len(recorder.final_graphs)
    second = [name for name in graphs if name.endswith(", replayed")]
    assert second
    for name in second:
        called = graphs[name.removesuffix(", replayed")]
        assert any(operator in graphs[name] for operator in FUSED)
        assert not any(operator in called for operator in FUSED)


@pytest.mark.slow
def test_no_guard_is_added(make_model, monkeypatch):
    """The second compilation asks sizes for nothing new."""
    counts = []
    for options in (REPLAYS, {}):
        found = []
        init = ShapeEnv.__init__

        def noted(env, *args, init=init, found=found, **more):
            found.append(env)
            init(env, *args, **more)

        monkeypatch.setattr(ShapeEnv, "__init__", noted)
        tokens(session_of(merged(make_model), options))
        monkeypatch.setattr(ShapeEnv, "__init__", init)
        counts.append(sorted(len(env.guards) for env in found if env.guards))
    assert counts[0] == counts[1]


class Gated(torch.nn.Module):
    """A norm and a product, and both in a branch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 64) / 8, requires_grad=False)
        self.norm = torch.nn.Parameter(torch.randn(64), requires_grad=False)

    def normed(self, x):
        return self.norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x, often):
        return torch.cond(often, lambda x: self.normed(x) @ self.weight.t(), self.other, (x,))

    def other(self, x):
        return x[:, :48].sin()


def test_a_match_in_a_subgraph_alone(taken):
    model, x = Gated(), torch.randn(3, 64)
    run = torch.compile(model, backend="attn_ops", fullgraph=True, options=REPLAYS)
    with recording() as recorder, torch.no_grad():
        for often in torch.tensor([True, False]):
            with replayed():
                torch.testing.assert_close(run(x, often), model(x, often), atol=1e-5, rtol=1e-5)
    assert set(taken) == {True}
    assert recorder.matches()["norm_products"] == 1
    assert recorder.matches()["fused_mlp"] == 0


def test_no_match_in_any_subgraph(taken):
    run = torch.compile(
        lambda x, often: torch.cond(often, lambda x: x.sin(), lambda x: x.cos(), (x,)),
        backend="attn_ops",
        options=REPLAYS,
    )
    with recording(Recorder(texts=True)) as recorder, replayed():
        torch.testing.assert_close(run(X, torch.tensor(True)), X.sin())
    assert set(taken) == {False}  # the only form
    assert not any("replayed" in name for name, _ in recorder.final_graphs)


@pytest.fixture
def failing(monkeypatch):
    """Inductor fails at every second form."""
    compile_fx = fx_passes.backend.compile_fx

    def fails(*args, **more):
        if more["config_patches"][fx_passes.backend.SLOT].second:
            compile_fx(*args, **more)
            raise TypeError("of its own")
        return compile_fx(*args, **more)

    monkeypatch.setattr("fx_passes.backend.compile_fx", fails)


@pytest.mark.slow
def test_a_second_form_that_fails(make_model, monkeypatch, failing):
    """Unless somebody has asked for it, there is one form, and the report says why."""
    monkeypatch.setattr("fx_passes.forms.takes_fused", lambda w, device: True)
    want = tokens(DecodeSession(make_model("llama"), max_batch_size=4, max_tokens=64))
    session = session_of(merged(make_model), {}, debug="eager_replay")
    assert tokens(session) == want
    why = (
        "replays run the decoder layer as calls do, for its own form failed: TypeError: of its own"
    )
    assert why in session.report().passes["fused_mlp"]
    assert session.compile_record.matches()["norm_products"] == 0
    asked = session_of(merged(make_model), debug="eager_replay")
    with pytest.raises(Exception, match="fused_mlp and norm_products must not be 'replays' where"):
        asked.warm_up()


@pytest.mark.parametrize("again", [*slow("another dumps"), *long("all is forgotten")])
def test_compiled_again_outside_of_a_warm_up(make_model, monkeypatch, taken, tmp_path, again):
    """A session's calls say by themselves that it captures."""
    monkeypatch.setattr("fx_passes.forms.takes_fused", lambda w, device: True)
    session = session_of(merged(make_model), {}, debug="eager_replay", verify="always")
    want = tokens(session)
    if again == "another dumps":
        another = DecodeSession(
            torch.compile(make_model("llama"), backend="attn_ops"), max_batch_size=2, max_tokens=64
        )
        with dump(tmp_path):
            another.generate([[1, 2]], 2)
    else:
        torch._dynamo.reset()
    taken.clear()
    assert tokens(session) == want
    assert set(taken) == {True, False}


def test_nothing_is_compiled_twice_without_a_match(monkeypatch):
    """Nor for a model that is trained."""
    compiled = []
    compile_fx = fx_passes.backend.compile_fx

    def counted(*args, **more):
        result = compile_fx(*args, **more)
        compiled.append(more["config_patches"][fx_passes.backend.SLOT].second)
        return result

    monkeypatch.setattr("fx_passes.backend.compile_fx", counted)
    weight = torch.randn(8, 8, requires_grad=True)
    for wants_grad in (False, True):
        torch._dynamo.reset()
        run = torch.compile(lambda x, w: torch.relu(x @ w), backend="attn_ops", options=REPLAYS)
        with torch.set_grad_enabled(wants_grad):
            got = run(torch.eye(8), weight)
        torch.testing.assert_close(got, torch.relu(weight))
    assert compiled == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("taken", ["graphs.saved.cache"], indirect=True)
def test_a_second_start_has_both(make_model, taken, tmp_path):
    options = {"debug": "eager_replay", "compile_cache": tmp_path}
    first = session_of(merged(make_model), **options)
    want = tokens(first)
    assert "; saved" in first.report().compile_cache
    second = session_of(merged(make_model), **options)
    assert tokens(second) == want
    assert second.report().compile_cache.startswith("loaded")
    assert set(taken) == {True, False}
    assert "1 x 2 layers" in str(second.report())


@pytest.mark.slow
def test_a_dump_of_a_session_has_both(make_model, monkeypatch, tmp_path):
    """It compiles once more what runs from then on."""
    monkeypatch.setattr("fx_passes.forms.takes_fused", lambda w, device: True)
    session = session_of(merged(make_model), {}, debug="eager_replay")
    want = tokens(session)
    with dump(tmp_path):
        assert tokens(session) == want
    printed = "".join(path.read_text() for path in tmp_path.rglob("*.txt"))
    printed += (tmp_path / "dump.json").read_text()
    assert "replayed" in printed
    assert "gated_mlp" in printed
