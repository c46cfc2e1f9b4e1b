"""Models with LoRA adapters of peft, and with weights quantized by torchao."""

import pytest
import torch
from torch._dynamo.utils import counters

from attn_ops.integrations.merged import merge_projections
from attn_ops.integrations.transformers import attention_specs
from tests.kit.marks import slow
from tests.kit.models import build_model, generated
from tests.kit.sessions import make_session, refuses, tokens_of

PROMPTS = [[5, 9, 33, 2, 61], [7], [11, 12]]


def expected(model) -> list[list[int]]:
    return [generated(model, prompt, 8, do_sample=False) for prompt in PROMPTS]


def plain(implementation: str):
    return build_model("llama", implementation, eos_token_id=None, bos_token_id=None)


def adapted(implementation: str, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **options,
    )
    torch.manual_seed(9)
    return peft.get_peft_model(plain(implementation), config).eval()


def quantized(implementation: str, config_name: str):
    torchao = pytest.importorskip("torchao.quantization")
    model = plain(implementation)
    torchao.quantize_(model, getattr(torchao, config_name)())
    return model


def check(model, wanted, compiled: bool) -> None:
    if compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = make_session(model, backend="TORCH")
    assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    report = session.report()
    assert (report.num_breaks, report.num_recompiles) == (0, 0)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_compiled_model_with_a_lora_adapter():
    wanted = expected(adapted("eager"))
    assert wanted != expected(plain("eager"))
    check(adapted("attn_ops").base_model.model, wanted, compiled=True)


def test_the_peft_model_itself():
    check(adapted("attn_ops"), expected(adapted("eager")), compiled=False)


@pytest.mark.parametrize("name", ["disable_adapter_layers", "merge_adapter", "set_adapter"])
def test_other_adapters_on_a_live_session(name):
    """A captured step, or kept prefixes, would go on with the old ones."""
    model = adapted("attn_ops")
    model.add_adapter("other", model.peft_config["default"])
    session = make_session(model, backend="TORCH")
    session.generate(PROMPTS, 2)
    change = getattr(model.base_model, name)
    change(*(["other"] if name == "set_adapter" else []))
    with pytest.raises(ValueError, match="adapters of the model must stay as they were"):
        session.generate(PROMPTS, 2)
    undo = {"merge_adapter": "unmerge_adapter", "disable_adapter_layers": "enable_adapter_layers"}
    getattr(model.base_model, undo.get(name, name))(*(["default"] if name == "set_adapter" else []))
    session.generate(PROMPTS, 2)


@pytest.mark.parametrize("inner", [False, True])
def test_an_adapter_that_acts_behind_some_tokens_is_refused(inner):
    """The inner model would not let it act at all."""
    model = adapted("attn_ops", alora_invocation_tokens=[33, 2])
    run = model.base_model.model if inner else model
    refuses(run, "every token alike, got 'default', an activated LoRA")
    with pytest.raises(ValueError, match="an activated LoRA"):
        attention_specs(run)  # by hand


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(plain("attn_ops"), config).eval()
    refuses(model, "self_attn must attend from a row a token, got 16 rows for 12 tokens")


@pytest.mark.parametrize(
    ("config_name", "compiled"),
    [
        ("Int8WeightOnlyConfig", False),
        ("Float8WeightOnlyConfig", False),
        *slow(("Float8WeightOnlyConfig", True), ("Int8WeightOnlyConfig", True)),
    ],
)
def test_weights_quantized_by_torchao(config_name, compiled):
    """They are not merged."""
    model, wanted = quantized("attn_ops", config_name), expected(quantized("eager", config_name))
    with pytest.raises(ValueError, match=r"q_proj must be a plain tensor.*not quantized"):
        merge_projections(model)
    check(model, wanted, compiled)


def test_merged_weights_are_not_quantized():
    """`quantize_` takes the layers apart from their merged weight: the session says so."""
    torchao = pytest.importorskip("torchao.quantization")
    model = plain("attn_ops")
    merge_projections(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="merge"):
        make_session(model)
