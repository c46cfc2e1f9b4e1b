"""Shapes of measured models: what a step reads."""

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from benchmarks.floor import Shape
from benchmarks.shapes import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model(name):
    """Its products and its head; norms are left out."""
    config = MODELS[name](2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    products = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert Shape.of(config).weight_elements() == sum(weight.numel() for weight in products)


def test_layers_with_a_window_read_no_more_than_it():
    shape = Shape.of(MODELS["gemma-3-12b"](None))
    assert shape.windows.count(None) == 8
    assert shape.windows.count(1024) == 40
    elements = 2 * shape.kv_heads * shape.head_size
    assert shape.kv_elements(1000) == 48 * 1000 * elements
    assert shape.kv_elements(4096) == (8 * 4096 + 40 * 1024) * elements
