"""The pipeline: order, third parties' passes, cache key, the user's pass and options."""

import dataclasses
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config

import fx_passes.backend
from fx_passes import (
    PassConfig,
    options,
    pass_names,
    recording,
    register_pass,
    unregister_pass,
)
from fx_passes.inductor_slot import SLOT, AtenPipeline, with_user_pass
from tests.fx_passes.pipeline_cases import ASKED, ATEN, CLASSES, Counting, UserPass, compiled

pytestmark = pytest.mark.usefixtures("own_pipeline")

BUILT_IN = [
    "device_constants", "fast_prefill", "outline_layers", "share_products", "short_products",
    "quantize_output", "collapse_views", "experts", "router", "skinny_products", "fused_mlp",
    "norm_products",
]  # fmt: skip
SWITCHES = {one.name: one.switch or one.name for one in CLASSES}
OFF = {
    "fast_prefill": "off", "attn_quant": "never", "experts": "never", "skinny_products": "never",
    "fused_mlp": "never", "norm_products": "never",
}  # fmt: skip


# -- order -----------------------------------------------------------------------------------------


def test_built_in_order():
    assert pass_names() == BUILT_IN
    switches = {f.name for f in dataclasses.fields(PassConfig)}
    others = {"early_launch", "check_passes", "batch_invariant"}
    assert switches == {*SWITCHES.values(), *others}, "one switch a pass"


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


def test_a_pass_that_is_not_there_is_not_taken_out():
    with pytest.raises(ValueError, match="name must be a pass, got 'counting'"):
        unregister_pass("counting")
    assert pass_names() == BUILT_IN


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
        compiled(options=dict.fromkeys(ASKED, "auto") | {switch: OFF.get(switch, False)})
    assert [r.pass_name for r in recorder.passes] == [n for n in BUILT_IN if SWITCHES[n] != switch]


def test_some_passes_run_when_asked():
    with recording() as recorder:
        compiled()
    assert [r.pass_name for r in recorder.passes] == [n for n in BUILT_IN if n not in ASKED]


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
    with monkeypatch.context() as patched:
        patched.setattr("fx_passes.inductor_slot._own_source", lambda: "changed")
        keys["what passes import"] = AtenPipeline(PassConfig()).uuid()
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


def test_torch_gives_no_advice_about_tensor_cores(monkeypatch):
    """RoPE's angles are float32 products: nothing a user should change."""
    compile_fx = fx_passes.backend.compile_fx

    def advises(*args, **more):
        warnings.warn(
            "TensorFloat32 tensor cores for float32 matrix multiplication ...", stacklevel=2
        )
        warnings.warn("something else", stacklevel=2)
        return compile_fx(*args, **more)

    monkeypatch.setattr("fx_passes.backend.compile_fx", advises)
    torch._dynamo.reset()
    run = torch.compile(torch.sin, backend="attn_ops")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(torch.ones(2))
    texts = [str(one.message) for one in found]
    assert "something else" in texts
    assert not any("TensorFloat32" in text for text in texts)
