"""The pipeline: order, third parties' passes, cache key, the user's pass and options, records."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

from fx_passes import (
    PassConfig,
    Recorder,
    attn_ops,
    options,
    pass_names,
    pipeline,
    recording,
    register_pass,
    unregister_pass,
)
from fx_passes.base import Pass
from fx_passes.inductor_slot import SLOT, AtenPipeline, with_user_pass

BUILT_IN = [
    "device_constants", "fast_prefill", "outline_layers", "share_products", "short_products",
    "quantize_output", "collapse_views",
]  # fmt: skip
CLASSES = [one for one in pipeline.pass_classes() if one.__module__.startswith("fx_passes.")]
ATEN = [one.name for one in CLASSES if one.stage == "aten"]
SWITCHES = {one.name: one.switch or one.name for one in CLASSES}
OFF = {"fast_prefill": "off", "attn_quant": "never"}
aten = torch.ops.aten


class Counting(Pass):
    """Counts sines and changes nothing."""

    name = "counting"
    stage = "aten"
    setting = 1

    def apply(self, graph):
        return len(graph.find_nodes(op="call_function", target=aten.sin.default))

    def settings(self):
        return {"setting": self.setting}


@pytest.fixture(autouse=True)
def own_pipeline(monkeypatch):
    """What a test registers is gone after it; passes of installed packages are left out."""
    monkeypatch.setattr(pipeline, "_PIPELINE", list(CLASSES))


class UserPass(CustomGraphPass):
    """A user's pass that notes what it saw, and has a key or none."""

    def __init__(self, key: str | None = "mine") -> None:
        self.key, self.seen = key, []

    def __call__(self, graph) -> None:
        self.seen.append(
            (
                len(graph.find_nodes(op="call_function", target=aten.mm.default)),
                inductor_config.max_fusion_size,
            )
        )

    def uuid(self):
        return self.key


def twice(x, w):
    """Two equal products that differ to Inductor's own CSE at trace time only in their views."""
    return (x.view(-1, 8) @ w).sin() + (x.view(-1, 8) @ w).cos()


X, W = torch.linspace(-1, 1, 24).view(3, 8), torch.eye(8) * 3


def compiled(function=twice, **arguments):
    arguments.setdefault("backend", attn_ops)
    if arguments["backend"] == "inductor":  # a hit in AOTAutograd's cache would run no pass at all
        with functorch_config.patch(enable_autograd_cache=False):
            return _compiled(function, arguments)
    return _compiled(function, arguments)


def _compiled(function, arguments):
    got = torch.compile(lambda x, w: function(x, w), fullgraph=True, **arguments)(X, W)
    torch.testing.assert_close(got, function(X, W))


# -- order -----------------------------------------------------------------------------------------


def test_built_in_order():
    assert pass_names() == BUILT_IN
    switches = {f.name for f in dataclasses.fields(PassConfig)}
    assert switches == set(SWITCHES.values()), "one switch a pass"


@pytest.mark.parametrize(
    ("where", "index"),
    [
        ({}, len(BUILT_IN)),
        ({"before": "outline_layers"}, BUILT_IN.index("outline_layers")),
        ({"after": "share_products"}, BUILT_IN.index("share_products") + 1),
        ({"before": "collapse_views"}, BUILT_IN.index("collapse_views")),
    ],
)
def test_register_and_unregister(where, index):
    register_pass(Counting, **where)
    assert pass_names().index("counting") == index
    assert [n for n in pass_names() if n != "counting"] == BUILT_IN
    unregister_pass("counting")
    assert pass_names() == BUILT_IN


def test_refusals():
    with pytest.raises(
        ValueError, match=r"at most one of before and after .* got 'share_products' and 'coll"
    ):
        register_pass(Counting, before="share_products", after="collapse_views")
    with pytest.raises(
        ValueError, match="must name a pass, got 'nothing'; supported: device_constants, fast_pre"
    ):
        register_pass(Counting, after="nothing")
    with pytest.raises(ValueError, match="name must be a pass, got 'counting'"):
        unregister_pass("counting")
    assert pass_names() == BUILT_IN
    register_pass(Counting)
    with pytest.raises(
        ValueError, match="pass name must be new, got 'counting'; taken: device_constants, fast"
    ):
        register_pass(Counting)


def test_a_registered_pass_runs_in_its_place():
    register_pass(Counting, before="collapse_views")
    with recording() as recorder:
        compiled()
    place = ATEN.index("collapse_views")
    ran = [r.pass_name for r in recorder.passes if r.stage == "aten"]
    assert ran == [*ATEN[:place], "counting", *ATEN[place:]]
    assert recorder.matches()["counting"] == 1


@pytest.mark.parametrize("name", BUILT_IN[1:])
def test_a_disabled_pass_does_not_run(name):
    with recording() as recorder:
        switch = SWITCHES[name]
        compiled(options={"fast_prefill": "auto"} | {switch: OFF.get(switch, False)})
    assert [r.pass_name for r in recorder.passes] == [n for n in BUILT_IN if n != name]


def test_fast_prefill_runs_when_asked():
    with recording() as recorder:
        compiled()
    assert [r.pass_name for r in recorder.passes] == [n for n in BUILT_IN if n != "fast_prefill"]


# -- the cache key ---------------------------------------------------------------------------------


def test_the_key_depends_on_all_that_matters(monkeypatch):
    keys = {"plain": AtenPipeline(PassConfig()).uuid()}
    assert AtenPipeline(PassConfig()).uuid() == keys["plain"], "the key is stable"
    keys["less"] = AtenPipeline(PassConfig(collapse_views=False)).uuid()
    register_pass(Counting)
    keys["more"] = AtenPipeline(PassConfig()).uuid()
    monkeypatch.setattr(Counting, "setting", 2)
    keys["setting"] = AtenPipeline(PassConfig()).uuid()
    unregister_pass("counting")
    register_pass(Counting, before="share_products")
    keys["order"] = AtenPipeline(PassConfig()).uuid()
    monkeypatch.setattr(Counting, "source", lambda self: "another")
    keys["source"] = AtenPipeline(PassConfig()).uuid()
    unregister_pass("counting")
    keys["user"] = AtenPipeline(PassConfig(), UserPass()).uuid()
    keys["other user"] = AtenPipeline(PassConfig(), UserPass("other")).uuid()
    keys["two users"] = with_user_pass(PassConfig(), [UserPass(), UserPass("other")]).uuid()
    keys["order of users"] = with_user_pass(PassConfig(), [UserPass("other"), UserPass()]).uuid()
    assert len(set(map(str, keys.values()))) == len(keys), keys


def test_a_user_pass_without_a_key_turns_the_cache_off():
    for theirs in (UserPass(None), lambda graph: None, [UserPass(), lambda graph: None]):
        assert with_user_pass(PassConfig(), theirs).uuid() is None


# -- the user's pass and options -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["config", "options", "our options"])
def test_a_users_pass_runs_before_ours(how):
    theirs = UserPass()
    given = {SLOT: theirs, "max_fusion_size": 17}
    if how == "options":
        compiled(options=given)
    else:
        with inductor_config.patch(given):
            compiled(
                **({"backend": "inductor", "options": options()} if how == "our options" else {})
            )
    assert theirs.seen == [(2, 17)], "it sees both products, and the user's option"


def test_our_pipeline_replaces_itself():
    theirs = UserPass()
    ours = with_user_pass(PassConfig(), theirs)
    again = with_user_pass(PassConfig(collapse_views=False), ours)
    assert again.user_pass is theirs
    assert not again.config.collapse_views
    chained = with_user_pass(PassConfig(), [ours, UserPass("other")])
    chained(torch.fx.Graph())
    assert len(theirs.seen) == 1, "the pass inside our older pipeline is the user's too"


def test_options_run_our_passes_in_plain_inductor():
    with recording() as recorder:
        compiled(backend="inductor", options=options())
    matches = recorder.matches()
    assert list(matches) == ATEN
    assert (matches["share_products"], matches["short_products"]) == (1, 0)


def test_the_backend_is_known_by_name():
    assert "attn_ops" in torch._dynamo.list_backends(), "install the distribution: make setup"


# -- configuration ---------------------------------------------------------------------------------


def test_split():
    assert PassConfig.split(None) == (PassConfig(), {})
    config, rest = PassConfig.split(
        {"share_products": False, "max-autotune": True, "triton.cudagraphs": False}
    )
    assert config == PassConfig(share_products=False)
    assert rest == {"max_autotune": True, "triton.cudagraphs": False}


@pytest.mark.parametrize("value", [1, "no", None])
def test_split_refuses_what_is_no_bool(value):
    with pytest.raises(ValueError, match=r"options\['share_products'\] must be True or False, got"):
        PassConfig.split({"share_products": value})


def test_split_refuses_unknown_options():
    with pytest.raises(
        ValueError,
        match="got 'share_product'; supported: attn_quant, collapse_views, device_constants",
    ):
        PassConfig.split({"share_product": False})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"options": {"share_product": False}},
            "options must name a pass or an option of torch._inductor.config",
        ),
        ({"options": {"share_products": 0}}, "must be True or False, got 0"),
        ({"options": {"max_fusion_size": "many"}}, "max_fusion_size"),
        ({"mode": "fastest"}, "mode must be known to Inductor, got 'fastest'; supported: default"),
    ],
)
def test_refusals_through_torch_compile(arguments, message):
    with pytest.raises((ValueError, BackendCompilerFailed), match=message) as error:
        compiled(**arguments)
    inner = getattr(error.value, "inner_exception", error.value)
    assert isinstance(inner, ValueError)


def test_a_mode_reaches_inductor():
    seen = []

    class Look(UserPass):
        def __call__(self, graph) -> None:
            seen.append(inductor_config.max_autotune)

    with inductor_config.patch({SLOT: Look()}):
        compiled(mode="max-autotune-no-cudagraphs")
    assert seen == [True]


# -- records ---------------------------------------------------------------------------------------


def test_recorder_counts_and_nests():
    register_pass(Counting)
    with recording() as outer:
        compiled()
        torch._dynamo.reset()
        with recording() as inner:
            compiled()
    compiled()
    assert (outer.num_graphs, inner.num_graphs) == (2, 1)
    assert (outer.matches()["counting"], inner.matches()["counting"]) == (2, 1), (
        "also when Inductor's cache is warm"
    )
    assert (outer.matches()["share_products"], inner.matches()["share_products"]) == (2, 1)
    assert inner.passes == outer.passes[len(inner.passes) :]
    assert [name for name, _ in inner.final_graphs] == ["whole graph"]
    assert inner.final_graphs[0][1].count("aten.mm.default(") == 1
    assert all(r.before is None and r.after is None for r in outer.passes)


def test_recorder_texts():
    with recording(Recorder(texts=True)) as recorder:
        compiled()
    shared = next(r for r in recorder.passes if r.pass_name == "share_products")
    assert (shared.before.count("aten.mm.default("), shared.after.count("aten.mm.default(")) == (
        2,
        1,
    )


def test_recorder_texts_of_an_outlined_model():
    """Printing a graph must not change which module owns it."""
    from torch import nn

    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
    ).requires_grad_(False)
    wanted = model(X)
    with recording(Recorder(texts=True)) as recorder:
        got = torch.compile(model, backend=attn_ops, fullgraph=True)(X)
    torch.testing.assert_close(got, wanted)
    assert recorder.matches()["outline_layers"] == 2
    outlined = next(r for r in recorder.passes if r.pass_name == "outline_layers")
    assert "layer_0(" in outlined.after
    assert "layer_0(" not in outlined.before


def test_printing_leaves_the_graph_as_it_is():
    from fx_passes.observe import graph_text

    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    assert graph_text(gm.graph) == graph_text(gm.graph)
    assert gm.graph.owning_module is gm


@pytest.mark.slow
def test_compiling_draws_nothing():
    """Nor is the code imported that could: pictures are for dumps."""
    code = """
import sys, torch, fx_passes, graphs
run = torch.compile(lambda x, w: torch.relu(x @ w), backend=fx_passes.attn_ops)
with fx_passes.recording(fx_passes.Recorder(texts=True)) as recorder, torch.no_grad():
    run(torch.ones(2, 3), torch.ones(3, 2))
assert recorder.passes and not any(one.pictures for one in recorder.passes)
assert not [name for name in sys.modules if name.startswith("fx_passes.pictures")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_recorder_draws_what_changes():
    """Graphs of Dynamo alone, before and after a pass that matched."""

    class Doubling(Pass):
        """Adds nothing twice."""

        name, stage = "doubling", "dynamo"

        def apply(self, graph):
            return 1

    def draw(before):
        old = len(before.nodes)
        return lambda after: (str(old), str(len(after.nodes)))

    register_pass(Doubling)
    with recording(Recorder(draw=draw)) as recorder:
        compiled()
    drawn = {one.pass_name: one.pictures for one in recorder.passes if one.pictures}
    assert list(drawn) == ["doubling"]
    assert drawn["doubling"][0] == drawn["doubling"][1]


def test_summaries_are_the_passes_own():
    class Telling(Counting):
        name = "telling"

        def summary(self):
            return f"{self.facts.get('sines', 0)} sines"

        def apply(self, graph):
            self.facts["sines"] = super().apply(graph)
            return 0

    register_pass(Telling)
    with recording() as recorder:
        compiled()
        torch._dynamo.reset()
        compiled()
    assert recorder.summaries() == {"telling": "1 sines"}


def test_recorder_output_code():
    with recording() as recorder:
        compiled()
    assert len(recorder.output_code) == 1
    assert "def call" in recorder.output_code[0]
