"""Models that a session refuses, and the sizes that it would take."""

import pytest

from tests.kit.models import build_model
from tests.kit.sessions import make_session


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
