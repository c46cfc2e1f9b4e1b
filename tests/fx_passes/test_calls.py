"""What is compiled for captured steps: one form, with passes that gain in replays."""

import json

import pytest
import torch

import fx_passes
from attn_ops.integrations.merged import merge_projections
from fx_passes import recording
from fx_passes.calls import calls, config_of_calls
from graphs import DecodeSession, dump

PASSES = ("fused_mlp", "norm_products")
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def tokens(session):
    return [g.token_ids for g in session.generate(PROMPTS, 12)]


@pytest.fixture
def session_of(make_model, monkeypatch):
    """A session of a new model, as if there were kernels for its weights."""
    monkeypatch.setattr("fx_passes.calls.takes_fused", lambda w, device: True)

    def make(of_compile=None, **options):
        torch._dynamo.reset()
        model = make_model("llama")
        merge_projections(model)
        compiled = torch.compile(model, backend="attn_ops", fullgraph=True, options=of_compile)
        return DecodeSession(compiled, max_batch_size=4, max_tokens=64, **options)

    return make


@pytest.mark.parametrize("captures", [True, False])
def test_by_default_where_steps_are_captured(monkeypatch, captures):
    """And where there are kernels for a weight: none here."""
    config, weight = fx_passes.PassConfig(), torch.zeros(64, 128, dtype=torch.bfloat16)
    combined = {"combo_kernels": True} if captures else {}
    with calls(captures=captures):
        assert config_of_calls(config, (weight,)) == (config, {})
        monkeypatch.setattr("fx_passes.calls.takes_fused", lambda w, device: w.shape == (128, 64))
        found = config_of_calls(config, (weight[0], 3, weight))
        assert config_of_calls(config, (weight.t(),)) == (config, {})
        one = fx_passes.PassConfig(fused_mlp="never", norm_products="always")
        assert config_of_calls(one, (weight,)) == (one, combined)
        none = fx_passes.PassConfig(fused_mlp="never", norm_products="never")
        assert config_of_calls(none, (weight,)) == (none, {})
    both = fx_passes.PassConfig(fused_mlp="always", norm_products="always")
    assert found == (both if captures else config, combined)


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, False])
def test_kernels_are_combined(session_of, monkeypatch, own):
    """As every piece is compiled; a user's own option replaces it."""
    found, compile_fx = [], fx_passes.backend.compile_fx

    def noted(*args, **more):
        found.append(more["config_patches"].get("combo_kernels"))
        return compile_fx(*args, **more)

    monkeypatch.setattr("fx_passes.backend.compile_fx", noted)
    options = {} if own is None else {"combo_kernels": own}
    tokens(session_of(options, debug="eager_replay"))
    assert found
    assert set(found) == {own is None}


@pytest.mark.parametrize("options", [{"debug": "eager_replay"}, {"cudagraph_mode": "NONE"}])
def test_sessions_say_whether_they_capture(make_model, session_of, options):
    want = tokens(DecodeSession(make_model("llama"), max_batch_size=4, max_tokens=64))
    session = session_of(**options)
    assert tokens(session) == want
    matches = session.compile_record.matches()
    assert [matches[name] for name in PASSES] == [int("debug" in options)] * 2
    assert session.counters.num_recompiles == 0


@pytest.mark.slow
def test_a_dump_compiles_the_same(session_of, tmp_path):
    """A session's calls say by themselves that it captures; and all may be forgotten."""
    session = session_of(debug="eager_replay", verify="always")
    want = tokens(session)
    with dump(tmp_path):
        assert tokens(session) == want
    passes = json.loads((tmp_path / "dump.json").read_text())["passes"]
    assert {one["name"] for one in passes if one["matches"]} >= set(PASSES)
    torch._dynamo.reset()
    with recording() as recorder:
        assert tokens(session) == want
    assert all(recorder.matches()[name] for name in PASSES)


@pytest.mark.slow
def test_a_second_start_has_it(session_of, tmp_path):
    options = {"debug": "eager_replay", "compile_cache": tmp_path}
    first = session_of(**options)
    want = tokens(first)
    assert "; saved" in first.report().compile_cache
    second = session_of(**options)
    assert tokens(second) == want
    assert second.report().compile_cache.startswith("loaded")
    assert "1 x 2 layers" in str(second.report())
    called = session_of(cudagraph_mode="NONE", compile_cache=tmp_path)
    assert tokens(called) == want
    assert not called.report().compile_cache.startswith("loaded")
