"""Models that a session refuses, or takes in pieces only, and the sizes that it would take."""

import pytest
import torch
from torch import nn

from graphs import DecodeSession
from graphs.app.parity import Reference
from tests.kit.marks import slow
from tests.kit.models import build_model
from tests.kit.sessions import PROMPTS, make_session, refuses, tokens_of


def tiny(config: str, model: str, **sizes):
    transformers = pytest.importorskip("transformers")
    from attn_ops.integrations.transformers import register

    register()
    made = getattr(transformers, config)(**(SIZES | sizes))
    return getattr(transformers, model)._from_config(made, attn_implementation="attn_ops").eval()


SIZES = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}


def compiled(model):
    return torch.compile(model, backend="attn_ops", fullgraph=True)


def test_a_name_is_told_how_to_load_it():
    message = (
        "^model must be a loaded model, got the name 'qwen3'; load it with AutoModelForCausalLM"
        r"\.from_pretrained\('qwen3', attn_implementation='attn_ops'\)$"
    )
    with pytest.raises(ValueError, match=message):
        DecodeSession("qwen3", max_batch_size=1, max_tokens=8)  # pyright: ignore
    with pytest.raises(ValueError, match=r"^model must be an nn\.Module, got int$"):
        DecodeSession(3, max_batch_size=1, max_tokens=8)  # pyright: ignore


WHISPER = {
    "d_model": 32, "decoder_layers": 1, "encoder_layers": 1, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32,
    "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "vocab_size": 64,
}  # fmt: skip


LLAMA = {"intermediate_size": 32, "num_key_value_heads": 2, "pad_token_id": 0}
XLNET = {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32}
REFUSED = {
    "a plain module": (
        lambda: nn.Linear(2, 2),
        "^model must have a Transformers config, got Linear without one; .*docs/by_hand.md$",
    ),
    "a classifier": (
        lambda: tiny("LlamaConfig", "LlamaForSequenceClassification", **LLAMA),
        "^model must compute logits of the next token, got LlamaForSequenceClassific",
    ),
    "in training": (
        lambda: build_model(attention_dropout=0.5).train(),
        r"^model\.training must be False, got True; call model\.eval\(\)$",
    ),
    "Whisper": (
        lambda: tiny("WhisperConfig", "WhisperForConditionalGeneration", **WHISPER),
        "^model must be a decoder alone, got WhisperForConditionalGeneration, an",
    ),
    "XLNet": (
        lambda: tiny("XLNetConfig", "XLNetLMHeadModel", **XLNET),
        "^model must have layers that .*, got XLNetLMHeadModel, whose layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    """A compiled model is refused for what the model is, before anything is traced."""
    make, message = REFUSED[name]
    model = make()
    refuses(model, message)
    refuses(compiled(model), message)


@pytest.fixture
def ctrl():
    """Its head is not tied: tied, a random model repeats its last token."""
    sizes = {"n_positions": 64, "n_embd": 32, "dff": 32, "n_layer": 1}
    model = tiny("CTRLConfig", "CTRLLMHeadModel", tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model.requires_grad_(False)


def test_ctrl_compiled_in_one_piece_is_told_what_dynamo_cannot_trace(ctrl):
    """Its forward assigns a buffer."""
    session = make_session(compiled(ctrl), max_batch_size=2)
    message = "^model must be traceable by Dynamo with fullgraph=True, got CTRLLMHeadModel: .*; cha"
    with pytest.raises(ValueError, match=message):
        session.generate(PROMPTS, 2)
    assert session.num_unfinished == 0


@pytest.mark.parametrize("backend", [None, *slow("aot_eager", "attn_ops")])
def test_ctrl_decodes(ctrl, backend):
    """Uncompiled, and compiled in the pieces around what Dynamo cannot trace."""
    reference = Reference(ctrl)
    wanted = [reference.generate(p, 6)[0] for p in PROMPTS]
    model = ctrl if backend is None else torch.compile(ctrl, backend=backend)
    assert tokens_of(make_session(model).generate(PROMPTS, 6)) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 6


def test_a_model_that_makes_a_padding_mask_is_told_so():
    """It was told to use a session, by the session."""
    layers = {"encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 4}
    model = tiny("BartConfig", "BartForCausalLM", d_model=32, decoder_ffn_dim=32, **layers)
    refuses(model, "^attention_mask must be left .*, got BartForCausalLM, which makes a padding")


def test_indexers_are_named():
    """They choose the keys of a row of latent attention."""
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "first_k_dense_replace": 1, "intermediate_size": 32}
    model = tiny("DeepseekV32Config", "DeepseekV32ForCausalLM", **sizes)
    refuses(model, "^layer_types must be supported, got indexed_attention; .* that select keys")


def test_alibi_models_have_attention_of_their_own():
    sizes = {"n_layers": 1, "n_heads": 4, "d_model": 32, "num_hidden_layers": 1}
    refuses(tiny("MptConfig", "MptForCausalLM", **sizes), "MptForCausalLM, .*own .*ALiBi")


def test_rope_that_depends_on_the_batch_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build_model("llama", rope_parameters=rope, max_position_embeddings=20)
    with pytest.raises(ValueError, match="max_tokens must be at most 20 with rope_type 'dynamic'"):
        make_session(model, max_batch_size=2, max_tokens=40)
    make_session(model, max_batch_size=2, max_tokens=20)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="max_tokens must be at most the model's 64, got 65"):
        make_session(build_model(max_position_embeddings=64), max_batch_size=1, max_tokens=65)


def test_unknown_layer_types_are_refused():
    model = build_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"layers with a state must call .* linear_attention"):
        make_session(model, max_batch_size=1, max_tokens=8)


def test_non_causal_layers_are_refused():
    model = build_model()
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"is_causal must be True of model.layers.0.self_attn"):
        make_session(model, max_batch_size=1, max_tokens=8)
