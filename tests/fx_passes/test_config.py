"""Options of passes and of Inductor: told apart, checked, and handed on."""

import pytest
import torch._inductor.config as inductor_config
from torch._dynamo.exc import BackendCompilerFailed

from fx_passes import PassConfig, options
from fx_passes.inductor_slot import SLOT
from tests.fx_passes.pipeline_cases import UserPass, compiled

pytestmark = pytest.mark.usefixtures("own_pipeline")


def test_split():
    assert PassConfig.split(None) == (PassConfig(), {})
    config, rest = PassConfig.split(
        {"share_products": False, "max-autotune": True, "triton.cudagraphs": False}
    )
    assert config == PassConfig(share_products=False)
    assert rest == {"max_autotune": True, "triton.cudagraphs": False}


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


@pytest.mark.parametrize(
    "switch", [{"attn_quant": "sometimes"}, {"fast_prefill": True}, {"share_products": "off"}]
)
def test_a_config_refuses_what_its_switches_do_not_take(switch):
    (name,) = switch
    with pytest.raises(ValueError, match=rf"options\['{name}'\] must be .*, got "):
        PassConfig(**switch)


def test_split_refuses_options_that_contradict_each_other():
    twice = {"max-autotune": True, "max_autotune": True}
    assert PassConfig.split(twice) == (PassConfig(), {"max_autotune": True})
    message = r"options\['max_autotune'\] must have one value, got True and False"
    with pytest.raises(ValueError, match=message):
        PassConfig.split({"max-autotune": True, "max_autotune": False})


@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("fast_prefill", "on"),
        ("early_launch", "on"),
        ("early_launch", "off"),
    ],
)
def test_plain_inductor_refuses_what_the_backend_alone_can_do(switch, value):
    with pytest.raises(ValueError, match=rf"'{switch}'\] must not be '{value}' under plain"):
        options(PassConfig(**{switch: value}))


def test_options_of_plain_inductor_are_not_lost_in_the_backend():
    """The backend has a pipeline of its own, which replaces theirs."""
    compiled(options=options())
    with pytest.raises((ValueError, BackendCompilerFailed), match="must name passes themselves"):
        compiled(options=options(PassConfig(share_products=False)))
