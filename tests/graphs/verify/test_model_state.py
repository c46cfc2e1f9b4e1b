"""Changes of a model while a session lives: refused or taken, and undone."""

import pytest
import torch
from torch import nn

from attn_ops.integrations.merged import merge_projections
from graphs.app.parity import Reference
from tests.kit.sessions import captured, chunked, refuses, uncaptured, waits

PROMPTS = [[5, 9, 3], list(range(20)), [60]]


@pytest.fixture
def model(make_model):
    return make_model("llama", num_layers=4)


def add_hook(model):
    model.model.layers[1].register_forward_hook(lambda *_: None)


CHANGES = {
    "training": (lambda m: m.train(), "model.training must be False, got True"),
    "training of a layer": (
        lambda m: m.model.layers[1].train(),
        r"model\.layers\.1\.training must be False, got True",
    ),
    "implementation": (
        lambda m: m.set_attn_implementation("eager"),
        r"attn_implementation must stay \['attn_ops'\], got \['eager'\]",
    ),
    "a hook": (add_hook, "hooks of the model must stay as they were, got 1, not 0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_refused(model, name):
    """Before the first step and later."""
    change, message = CHANGES[name]
    session, new = captured(model), captured(model)
    session.add(PROMPTS[0], 8)
    for _ in range(3):
        session.step()
    change(model)
    for one in (session, new):
        with pytest.raises(ValueError, match=message):
            one.generate(PROMPTS, 2)


def test_hooks_of_a_compiled_model(model):
    session = uncaptured(torch.compile(model, backend="eager"))
    session.generate(PROMPTS, 2)
    handle = model.model.layers[1].register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match="hooks of the model must stay as they were"):
        session.generate(PROMPTS, 2)
    handle.remove()
    session.generate(PROMPTS, 2)


def test_hooks_of_steps_that_are_called(model):
    """Neither compiled nor captured, a model runs them."""
    session, calls = uncaptured(model), []
    session.generate(PROMPTS, 2)
    model.model.layers[1].register_forward_hook(lambda *a: calls.append(1))
    session.generate(PROMPTS, 2)
    assert len(calls) == 2


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("debug", [None, "eager_replay"])
def test_a_change_that_is_undone(model, debug, decode_steps, num_steps):
    """A refused step launches and records nothing."""
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5)).eval()
    reference = Reference(model)
    wanted = reference.generate(PROMPTS[1], 12)[0]
    session = chunked(model, debug=debug, decode_steps=decode_steps)
    request = session.add(PROMPTS[1], 12)
    for _ in range(num_steps):
        session.step()
    model.train()
    with pytest.raises(ValueError, match="training must be False"):
        session.step()
    model.eval()
    while session.num_unfinished:
        session.step()
    assert session.result(request).token_ids == wanted


@pytest.mark.parametrize("options", [{}, {"share_prefixes": True}, {"decode_steps": 4}])
def test_what_was_launched_for_a_changed_model_is_dropped(model, options, monkeypatch):
    """An idle GPU begins before the check; merged adapters are other numbers in the same place."""
    reference = Reference(model)
    wanted = [reference.generate(p, 6)[0] for p in PROMPTS]
    session = chunked(model, debug="eager_replay", **options)
    session.warm_up()
    monkeypatch.setattr(type(session.plan), "debug", None)  # a replay does not run the model
    requests = [session.add(prompt, 6) for prompt in PROMPTS]
    weight, kept = model.lm_head.weight, model.lm_head.weight.detach().clone()
    with torch.no_grad():
        weight.normal_()
    model.lm_head.train()
    waits(session, "training must be False")
    model.lm_head.eval()
    with torch.no_grad():
        weight.copy_(kept)
    while session.num_unfinished:
        session.step()
    assert [session.result(number).token_ids for number in requests] == wanted


def test_autocast(model):
    session = chunked(model)
    session.add(PROMPTS[0], 4)
    with torch.autocast("cpu", torch.bfloat16):
        refuses(model, "autocast must be off")
        with pytest.raises(ValueError, match="autocast must be off"):
            session.step()


def test_models_in_training_mode(model):
    refuses(model.train(), "model.training must be False, got True; call model.eval()")
    model.eval().model.layers[2].mlp.train()  # nothing in it draws
    chunked(model)
    model.model.layers[2].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    refuses(model, "model.layers.2.mlp.act_fn.1.training must be False")


REPLACED = {
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.clone())),
}


@pytest.mark.parametrize(
    ("debug", "kind"),
    [
        (None, "data"),
        ("eager_replay", "parameter"),
        pytest.param(None, "parameter", marks=pytest.mark.slow),
        pytest.param("eager_replay", "data", marks=pytest.mark.slow),
    ],
)
def test_merged_weights_that_are_taken_apart(model, kind, debug):
    assert merge_projections(model) == 8
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    session = chunked(compiled, debug=debug)
    session.generate(PROMPTS, 2)
    REPLACED[kind](model.model.layers[1].self_attn.k_proj)
    with pytest.raises(
        ValueError, match=r"k_proj.weight (must be a view of its merged|at another)"
    ):
        session.generate(PROMPTS, 2)
