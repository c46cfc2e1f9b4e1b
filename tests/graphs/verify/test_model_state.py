"""What may change of a model while a session lives: what is refused, taken and undone."""

import contextlib
import copy
import random
import threading

import pytest
import torch
from torch import nn

from attn_ops.integrations.merged import merge_projections
from attn_ops.integrations.transformers import dynamic_batch
from graphs.app.parity import Reference
from tests.kit.interrupts import Interrupt
from tests.kit.sessions import chunked, drain, refuses

PROMPTS = [[5, 9, 3], list(range(20)), [60]]


@pytest.fixture
def model(make_model):
    return make_model("llama", num_layers=4)


CHANGES = {
    "another implementation": lambda m: m.set_attn_implementation("eager"),
    "another implementation of a layer": lambda m: setattr(
        m.model.layers[1].self_attn, "config", with_implementation(m.config, "sdpa")
    ),
    "training": lambda m: m.train(),
    "another layer's cache": lambda m: setattr(m.model.layers[1].self_attn, "layer_idx", 2),
    "a module": lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.ReLU()),
    "no module": lambda m: setattr(m.model.layers[1].mlp, "act_fn", None),
    "a layer less": lambda m: setattr(m.config, "num_hidden_layers", 3),
    "a mean": lambda m: m.model.norm.register_forward_hook(lambda *a: a[2] + a[2].mean(1, True)),
}


def with_implementation(config, name):
    config = copy.copy(config)
    config._attn_implementation = name
    return config


@pytest.mark.parametrize("mode", ["called", "captured", "before"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_refused(model, name, mode):
    """Nothing is handed out, and nothing of what the change would do stays behind."""
    options = {"debug": "eager_replay"} if mode == "captured" else {}
    session = chunked(model, **options)
    if mode != "before":
        session.add(PROMPTS[0], 8)
        for _ in range(3):
            session.step()
    CHANGES[name](model)
    with pytest.raises(ValueError, match=r"must stay where they were, got"):
        session.generate(PROMPTS, 2) if mode == "before" else session.step()


def test_per_layer_configs_are_told_apart(model):
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
    session = chunked(model)
    model.model.layers[0].self_attn.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"layers.0.self_attn.config._attn_impl\w* is 'sdpa'"):
        session.generate(PROMPTS, 2)


TAKEN = {
    "a number": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.9),
    "a function": lambda m: setattr(m.model.layers[0].mlp, "forward", torch.tanh),
    "a hook": lambda m: m.model.layers[2].mlp.register_forward_hook(lambda *a: a[2] * 2),
    "training of a layer": lambda m: m.model.layers[1].train(),
    "a bias": lambda m: setattr(
        m.model.layers[0].self_attn.k_proj, "bias", nn.Parameter(torch.linspace(-3, 3, 32))
    ),
    "a buffer": lambda m: m.model.layers[0].register_buffer("k_scale", torch.ones(1)),
    "a note": lambda m: setattr(m.model.layers[0], "notes", [1]),
    "a token of the config": lambda m: setattr(m.config, "pad_token_id", 0),
}


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("debug", [None, "eager_replay"])
@pytest.mark.parametrize("name", TAKEN)
def test_changes_that_are_taken(model, name, debug, update):
    """New requests get what the changed model gives; graphs are made anew."""
    session = chunked(model, debug=debug)
    session.generate(PROMPTS, 3)
    graphs = list(session.graphs or ())
    if update:
        with torch.no_grad():
            model.lm_head.weight.normal_(0, 0.2)
    TAKEN[name](model)
    reference = Reference(model)
    wanted = [reference.generate(p, 6)[0] for p in PROMPTS]
    assert [r.token_ids for r in session.generate(PROMPTS, 6)] == wanted
    assert not set(graphs) & set(session.graphs or ())


def test_a_compiled_model_takes_no_hook(model):
    session = chunked(torch.compile(model, backend="eager"))
    session.generate(PROMPTS, 2)
    handle = model.model.layers[1].register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match=r"_forward_hooks .*supported: models that are not"):
        session.generate(PROMPTS, 2)
    handle.remove()
    session.generate(PROMPTS, 2)


def test_attributes_that_the_model_sets_itself(model):
    counts = []

    def counting(module, *args):
        module.calls = getattr(module, "calls", 0) + 1

    session = chunked(model)
    model.model.layers[1].register_forward_hook(counting)
    check = session.state._contract.check
    session.state._contract.check = lambda: (counts.append(1), check())
    session.generate(PROMPTS, 8)
    assert len(counts) == 1


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
    with pytest.raises(ValueError, match=r"training is True, not False"):
        session.step()
    model.eval()
    while session.num_unfinished:
        session.step()
    assert session.result(request).token_ids == wanted


def scale(model):
    model.model.layers[0].self_attn.scaling = 0.9


def add_the_mean(model):
    model.model.norm.register_forward_hook(lambda *a: a[2] + a[2].mean(1, True))


def counted(session) -> list[int]:
    """An entry for each check of the contract that has come to an end without an error."""
    done, check = [], session.state._contract.check

    def counting():
        check()
        done.append(1)

    session.state._contract.check = counting
    return done


@pytest.mark.parametrize("change", [scale, add_the_mean])
def test_an_interrupt_leaves_a_change_unchecked(model, change):
    """Between any two lines of a check: the next one looks again, and takes or refuses it."""
    model.model.layers[1].register_forward_hook(  # sets an attribute in its own forward
        lambda module, *a: setattr(module, "calls", getattr(module, "calls", 0) + 1)
    )
    session = chunked(model)
    state, unchanged = session.state, dict(vars(session.state))
    change(model)
    count = Interrupt(0, ("graphs/model_changes.py",))
    with contextlib.suppress(ValueError):
        count.during(state.check)
    assert count.num_lines > 500
    contract = counted(session)
    for at in random.Random(0).sample(range(1, count.num_lines), 25):
        vars(state).update(unchanged)
        contract.clear()
        with contextlib.suppress(ValueError):
            Interrupt(at, count.files).during(state.check)
        if change is scale:
            assert state.check(), at  # graphs are older than the model
            assert contract, at
        else:
            with pytest.raises(ValueError, match=r"must stay where they were, got .*hook"):
                state.check()
            assert not contract, at


@pytest.mark.parametrize("debug", [None, "eager_replay"])
def test_a_step_that_is_interrupted_while_it_checks_a_change(model, debug):
    """It launches nothing; the next step checks the change, and draws the changed model's token."""
    session = chunked(model, debug=debug)
    session.generate(PROMPTS, 3)
    graphs = list(session.graphs or ())
    scale(model)
    wanted = Reference(model).generate(PROMPTS[1], 6)[0]
    request, check = session.add(PROMPTS[1], 6), session.state._contract.check

    def interrupted():
        session.state._contract.check = check
        raise KeyboardInterrupt

    session.state._contract.check = interrupted
    steps = dict(session.num_steps)
    with pytest.raises(KeyboardInterrupt):
        session.step()
    assert session.num_steps == steps
    assert drain(session)[request] == wanted
    assert not set(graphs) & set(session.graphs or ())


def test_weights_change_in_place(model):
    session = chunked(model)
    session.generate(PROMPTS, 2)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.2)
    reference = Reference(model)
    wanted = [reference.generate(p, 6)[0] for p in PROMPTS]
    assert [r.token_ids for r in session.generate(PROMPTS, 6)] == wanted


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


def test_residual_dropout(make_model):
    transformers = pytest.importorskip("transformers")
    config = transformers.PhiConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        intermediate_size=96, resid_pdrop=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    refuses(model.train(), "training must be False")
    session = chunked(model.eval())
    model.train()
    with pytest.raises(ValueError, match="training is True"):
        session.generate(PROMPTS, 2)


# -- merged weights --------------------------------------------------------------------------------

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


# -- one thread at a time --------------------------------------------------------------------------


def test_threads_step_in_turn(model):
    reference = Reference(model)
    wanted = [reference.generate(p, 12)[0] for p in PROMPTS]
    session = chunked(model)
    ids = [session.add(p, 12) for p in PROMPTS]
    outputs, errors, start = [], [], threading.Barrier(3)

    def steps():
        start.wait()
        try:
            while session.num_unfinished:
                outputs.extend(session.step())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=steps, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors
    assert [session.result(i).token_ids for i in ids] == wanted
    assert len(outputs) == sum(map(len, wanted))
    assert session.cache.num_free_blocks == session.cache.num_blocks - 1


def test_a_hook_that_steps(model):
    session = chunked(model)
    session.warm_up()
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda *args: session.step() and None)
    session.add(PROMPTS[0], 4)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"step\(\) must not be called from inside"
    ):
        session.step()


def test_sessions_of_one_model_in_two_threads(model):
    """One is made while another decodes as many rows as the checks look at."""
    prompts = [[i + 1, i + 2] for i in range(9)]
    reference = Reference(model)
    wanted = [reference.generate(p, 8)[0] for p in prompts]
    session = chunked(model, max_batch_size=9, max_tokens_per_step=32)
    done, errors = threading.Event(), []

    def makes():
        try:
            while not done.is_set():
                chunked(model)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=makes, daemon=True)
    thread.start()
    for _ in range(4):
        assert [r.token_ids for r in session.generate(prompts, 8)] == wanted
    done.set()
    thread.join(timeout=60)
    assert not errors


def test_patches_of_two_threads_are_undone():
    """The first to come leaves first; without a lock it would leave the other's behind."""
    before = torch._debug_has_internal_overlap
    tensors = [torch.zeros(1, 4, dtype=torch.int64) for _ in range(4)]
    first_in, second_out = threading.Event(), threading.Event()

    def first():
        with dynamic_batch(tensors[0], tensors[1]):
            first_in.set()
            second_out.wait(0.2)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    first_in.wait()
    with dynamic_batch(tensors[2], tensors[3]):
        thread.join(timeout=10)
    assert torch._debug_has_internal_overlap is before
