"""Hooks and forwards of instances: each model's own, whatever was compiled before it."""

import pytest
import torch
from torch import nn

from tests.kit.marks import slow
from tests.kit.sessions import make_session, refuses, tokens_of

PROMPTS = [[5, 9, 33, 2, 61], [7], [11, 12]]


def scaling(factor: float):
    return lambda module, args, output: output * factor


def hook(model, factor: float = 2.0) -> None:
    model.model.layers[0].mlp.register_forward_hook(scaling(factor))


def two_hooks(model) -> None:
    hook(model)
    model.model.norm.register_forward_pre_hook(lambda module, args: (-args[0],))


def flag(model, with_kwargs: bool) -> None:
    """One hook, whose factor is another where it is given keywords."""
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, *given: given[-1] * (0.1 if len(given) == 3 else 2), with_kwargs=with_kwargs
    )


def own_forward(model) -> None:
    layer = model.model.layers[0].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2


SURGERIES = {
    "nothing": lambda model: None,
    "a hook": hook,
    "another hook": lambda model: hook(model, -3.0),
    "two hooks": two_hooks,
    "a forward": own_forward,
    "without keywords": lambda model: flag(model, False),
    "with keywords": lambda model: flag(model, True),
}


@pytest.fixture(scope="module")
def wanted(make_model):
    """Tokens of each model uncompiled."""
    found = {}
    for name, surgery in SURGERIES.items():
        model = make_model("llama", num_layers=1)
        surgery(model)
        found[name] = tokens_of(make_session(model).generate(PROMPTS, 6))
    assert len({str(tokens) for tokens in found.values()}) == 5  # three double alike
    return found


@pytest.mark.parametrize(
    "order",
    [
        ["nothing", "a hook", "two hooks"],
        *slow(["another hook", "nothing", "a forward", "without keywords", "with keywords"]),
    ],
)
def test_equal_models_with_other_hooks(make_model, wanted, order):
    """Dynamo guards on hooks that exist, and not on their absence."""
    torch._dynamo.reset()
    for name in order:
        model = make_model("llama", num_layers=1)
        SURGERIES[name](model)
        session = make_session(torch.compile(model, backend="eager", fullgraph=True))
        assert tokens_of(session.generate(PROMPTS, 6)) == wanted[name], name


def test_hooks_do_not_compile_the_model_of_another_session_anew(make_model):
    torch._dynamo.reset()
    for num_graphs in (1, 0):
        model = make_model("llama", num_layers=1)
        hook(model)
        session = make_session(torch.compile(model, backend="eager", fullgraph=True))
        session.generate(PROMPTS, 2)
        assert session.counters.num_graphs == num_graphs


def test_global_hooks_of_a_compiled_model_are_refused(make_model):
    model = make_model("llama", num_layers=1)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        make_session(model)
        refuses(torch.compile(model, backend="eager"), "own modules, got global hooks")
    finally:
        handle.remove()


def test_classes_patched_after_an_equal_model_was_compiled(make_model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.utils.deprecation import deprecate_kwarg

    from attn_ops.integrations.transformers.hooks import _patches

    torch._dynamo.reset()

    def tokens(compiled=True):
        model = make_model("llama")
        run = torch.compile(model, backend="attn_ops") if compiled else model
        return tokens_of(make_session(run).generate(PROMPTS, 6))

    plain, forward = tokens(), LlamaMLP.forward
    for factor in (-3, 2):
        monkeypatch.setattr(LlamaMLP, "forward", lambda self, x, f=factor: f * forward(self, x))
        assert tokens() == tokens(compiled=False) != plain
    monkeypatch.undo()
    renames = deprecate_kwarg("hidden", version="9.9", new_name="x")  # as models of 5.24 do
    monkeypatch.setattr(LlamaMLP, "forward", renames(lambda self, x: 5 * forward(self, x)))
    assert LlamaMLP.forward in [function for _, function in _patches(make_model("llama"))]
    assert tokens() == tokens(compiled=False) != plain
    monkeypatch.undo()
    assert tokens() == plain
