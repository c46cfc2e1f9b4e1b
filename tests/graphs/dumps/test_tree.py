"""The map of a model: a row for modules that are built alike."""

from attn_ops import AttentionSpec
from attn_ops.integrations.transformers import attention_specs
from graphs.dumps.tree import attention_groups, module_rows
from tests.kit.models import build_model


def attention_rows(model, *arguments) -> dict[str, str]:
    rows = module_rows(model, *arguments)
    return {row["path"]: row["attention"] for row in rows if row["attention"]}


def test_attention_stands_at_its_module():
    model = build_model("llama")
    (words,) = attention_rows(model, attention_specs(model)).values()
    assert words.startswith("4 heads, 2 KV heads of ")
    assert attention_rows(model) == {}


def test_layers_that_are_built_alike_and_attend_otherwise():
    model = build_model("gemma2", num_layers=3)
    specs: list[AttentionSpec] = attention_specs(model)
    found = attention_rows(model, specs, [True, False, True])
    assert list(found) == ["model.layers.0.self_attn"]
    first, second = found["model.layers.0.self_attn"].split("; ")
    assert first.startswith("2 x ")
    assert "sliding_window 6" in first
    assert first.endswith("blocks of layers with a window")
    assert second.startswith("1 x ")
    assert second.endswith("blocks of layers that see all keys")


def test_a_layer_without_a_cache_of_its_own():
    """Of Gemma 3n's five layers the last two read the caches of others."""
    model = build_model("gemma3n")
    specs = attention_specs(model)
    found = attention_rows(model, specs)
    assert sum(int(part[0]) for words in found.values() for part in words.split("; ")) == 5
    assert ["cache of" in words for words in found.values()] == [False, True]
    sliding, full = found["model.layers.3.self_attn"].split("; ")
    assert sliding.endswith(", cache of layer 1")
    assert full.endswith(", cache of layer 2")
    groups = attention_groups(model, specs)
    assert [(one["layers"], one["num"], one["shared"]) for one in groups] == [
        ("0-1, 3", 3, {1: "3"}), ("2, 4", 2, {2: "4"}),
    ]  # fmt: skip
    assert "sliding_window 6" in groups[0]["words"]


def test_layers_with_caches_of_their_own():
    model = build_model("gemma2", num_layers=3)
    groups = attention_groups(model, attention_specs(model))
    assert [(one["layers"], one["shared"]) for one in groups] == [("0, 2", {}), ("1", {})]
