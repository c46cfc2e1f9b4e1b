"""Models that drop the keywords of attn_ops, and those with attention classes of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import graphs
from attn_ops.integrations.transformers import carry_keywords, register
from attn_ops.integrations.transformers.keywords import KeywordCarrier, carried
from attn_ops.integrations.transformers.own_attention import register_classes
from tests.kit.marks import long, slow

TINY = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
LAYERED = TINY | {"intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
CONFIGS = {
    "stablelm": LAYERED | {"num_key_value_heads": 2},
    "nemotron": LAYERED | {"num_key_value_heads": 2},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 97},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "window_size": 5,
        "attention_types": [[["global", "local"], 1]],
    },
    "falcon": TINY | {"num_hidden_layers": 2, "num_kv_heads": 2, "new_decoder_architecture": True},
}  # fmt: skip
PROMPTS = [[5, 9, 33, 2, 71, 8, 8, 40, 13], [7], [11, 12]]


def model_of(model_type: str, implementation: str, **changes):
    sizes = CONFIGS[model_type] | changes
    config = transformers.AutoConfig.for_model(model_type, **sizes, bos_token_id=None)
    config.eos_token_id = None
    torch.manual_seed(7)
    register()
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation=implementation).eval()


def expected(model_type: str, **changes) -> list[list[int]]:
    model = model_of(model_type, "eager", **changes)
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def session_of(model, **options):
    options = {"max_tokens": 64, "block_size": 8, "backend": "TORCH"} | options
    return graphs.DecodeSession(model, max_batch_size=4, cache_tokens=256, **options)


OLD = {"new_decoder_architecture": False, "num_kv_heads": None}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in CONFIGS),
        *(("falcon", OLD | {"multi_query": m}) for m in (True, False)),
    ],
)
def test_tokens_are_those_of_generate(model_type, changes):
    session = session_of(model_of(model_type, "attn_ops", **changes))
    outputs = session.generate(PROMPTS, 12)
    assert [o.token_ids for o in outputs] == expected(model_type, **changes)


def test_falcon_with_alibi_is_refused():
    with pytest.raises(ValueError, match=r"config\.alibi must be False"):
        model_of("falcon", "attn_ops", alibi=True)


def test_git_is_refused():
    register()
    config = transformers.AutoConfig.for_model("git", num_hidden_layers=1)
    with pytest.raises(ValueError, match="GIT, whose text sees all of an image"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")


def test_tables_are_filled_once():
    register()
    from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES as classes

    first = classes["attn_ops"]
    register_classes()
    assert classes["attn_ops"] is first


def test_layers_of_images_keep_their_own_attention():
    """DeepSeek-VL's table had no entry: a KeyError when the model was built."""
    from transformers.models.sam.modeling_sam import SAM_VISION_ATTENTION_CLASSES as classes

    register()
    assert classes["attn_ops"] is classes["eager"]


@pytest.mark.parametrize("model_type", [*slow("stablelm"), *long("gptj")])
def test_compiled_without_breaks_or_recompiles(model_type):
    torch._dynamo.reset()
    model = torch.compile(model_of(model_type, "attn_ops"), backend="attn_ops", fullgraph=True)
    session = session_of(model)
    outputs = session.generate(PROMPTS, 12)
    report = session.report()
    assert (report.num_breaks, report.num_recompiles) == (0, 0)
    assert [o.token_ids for o in outputs] == expected(model_type)


def test_two_sessions_of_one_model_have_one_carrier():
    model = model_of("stablelm", "attn_ops")
    first, second = session_of(model), session_of(model)
    assert len(model._forward_pre_hooks) == 1
    assert first.generate(PROMPTS, 12) == second.generate(PROMPTS, 12)
    assert carried(model.model.layers[0].self_attn) == {}


def test_nothing_is_kept_when_the_forward_raises():
    model = model_of("stablelm", "attn_ops")
    layers = [layer.self_attn for layer in model.model.layers]
    carry_keywords(model, layers)
    for _ in range(2):
        with pytest.raises(ValueError, match="kv_caches must hold"):
            model(torch.tensor([[3]]), attn_metadata="none", kv_caches=[])
        assert layers[0].keyword_carrier.keywords is None


def test_one_thread_at_a_time():
    """Others may train and `generate` beside a session's forward."""
    carrier = KeywordCarrier(("attn_metadata",))
    carrier.take(None, (), {"attn_metadata": "first"})
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="one thread at a time"):
            other.submit(carrier.take, None, (), {"attn_metadata": "second"}).result()
        other.submit(carrier.take, None, (), {"labels": 1}).result()
        other.submit(carrier.drop, None, (), None).result()
    assert carrier.keywords == {"attn_metadata": "first"}
    carrier.take(None, (), {"attn_metadata": "second"})  # the first is what Ctrl-C has left
    assert carrier.keywords == {"attn_metadata": "second"}
    carrier.drop(None, (), None)
    assert carrier.keywords is None


def test_a_hook_that_is_added_to_a_carrying_model_is_seen():
    """The carrier's hooks were there before the session remembered the model's."""
    model = model_of("stablelm", "attn_ops")
    session = session_of(torch.compile(model, backend="eager"))
    session.add(PROMPTS[0], 4)
    session.step()
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *args: None)
    with pytest.raises(ValueError, match="hooks"):
        session.step()


def test_generate_says_what_to_use():
    """Also with padding, and for a model whose implementation came from a config used before."""
    model = model_of("stablelm", "attn_ops")
    later = transformers.AutoModelForCausalLM.from_config(model.config)
    wanted = r"graphs\.DecodeSession.*set_attn_implementation.*sets it in that config too"
    for mask in (torch.ones(2, 2), torch.tensor([[0, 1], [1, 1]])):
        for one in (model, later):
            with pytest.raises(ValueError, match=wanted):
                one.generate(torch.tensor([[3, 4]] * 2), attention_mask=mask, max_new_tokens=2)
