"""Shapes of measured models: what a step reads."""

import pytest

pytest.importorskip("transformers")

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.floor import Shape, has_experts, limit_ms
from benchmarks.shapes import MODELS


def is_like_llama(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return not has_experts(config) and "linear_attention" not in kinds


@pytest.mark.parametrize("name", [n for n in MODELS if is_like_llama(MODELS[n](1))])
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


def test_a_step_reads_a_head_that_is_the_embedding():
    """And keys of the layers that have some: two of eight."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(MODELS["qwen3.5-4b"](8)).bfloat16()
        caches = [torch.empty(8, 2, 16, 4, 256, dtype=torch.bfloat16) for _ in range(2)]
    weights = sum(p.nbytes for p in model.parameters())
    limit, chosen = limit_ms(model, caches, 3, 100, 1000.0)
    assert (round(limit), chosen) == (weights + 3 * 2 * 2 * 4 * 256 * 100 * 2, 0.0)


def test_a_step_reads_the_experts_that_are_chosen():
    """All weights but the embedding at 1,024 rows; of Qwen3 8 of 128 experts a layer at one."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(MODELS["qwen3-30b-a3b"](2)).bfloat16()
        caches = [torch.empty(8, 2, 16, 4, 128, dtype=torch.bfloat16) for _ in range(2)]
    experts = 3 * 2048 * 768 * 128 * 2
    others = sum(p.numel() for p in model.parameters()) - experts - 151936 * 2048
    keys = 2 * 2 * 4 * 128 * 100
    limit, chosen = limit_ms(model, caches, 1, 100, 1000.0)
    assert (round(limit), chosen) == (2 * (others + experts * 8 // 128 + keys), 8.0)
    limit, chosen = limit_ms(model, caches, 1024, 0, 1000.0)
    assert round(limit) == 2 * (others + experts)
    assert chosen == pytest.approx(128)
