"""Models that a session refuses, and the sizes that it would take."""

import pytest

from tests.kit.models import build_model
from tests.kit.sessions import make_session, refuses


def tiny(config: str, model: str, **sizes):
    transformers = pytest.importorskip("transformers")
    from attn_ops.integrations.transformers import register

    register()
    made = getattr(transformers, config)(**(SIZES | sizes))
    return getattr(transformers, model)._from_config(made, attn_implementation="attn_ops").eval()


SIZES = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}


def test_a_model_that_makes_a_padding_mask_is_told_so():
    """It was told to use a session, by the session."""
    layers = {"encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 4}
    model = tiny("BartConfig", "BartForCausalLM", d_model=32, decoder_ffn_dim=32, **layers)
    refuses(model, "^attention_mask must be left .*, got BartForCausalLM, which makes a padding")


def test_latent_attention_is_named():
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "first_k_dense_replace": 1, "intermediate_size": 32}
    refuses(tiny("DeepseekV3Config", "DeepseekV3ForCausalLM", **sizes), r"latent attention \(MLA\)")


def test_rope_that_depends_on_the_batch_is_refused():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = build_model("phi3", rope_parameters=rope, original_max_position_embeddings=20)
    with pytest.raises(ValueError, match="max_tokens must be at most 20 with rope_type 'longrope'"):
        make_session(model, max_batch_size=2, max_tokens=40)
    make_session(model, max_batch_size=2, max_tokens=20)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="max_tokens must be at most the model's 64, got 65"):
        make_session(build_model(max_position_embeddings=64), max_batch_size=1, max_tokens=65)


def test_unknown_layer_types_are_refused():
    model = build_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layer_types must be supported, got linear_attention"):
        make_session(model, max_batch_size=1, max_tokens=8)


def test_non_causal_layers_are_refused():
    model = build_model()
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"is_causal must be True of model.layers.0.self_attn"):
        make_session(model, max_batch_size=1, max_tokens=8)
