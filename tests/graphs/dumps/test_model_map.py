"""The map of a model: a row for modules that are built alike, and attention by group."""

from attn_ops.integrations.transformers import attention_specs
from graphs.dumps.model_map import attention_groups, module_rows
from tests.kit.models import build_model


def test_equal_layers_are_one_row():
    model = build_model("llama", num_layers=3)
    rows = {row["path"]: row for row in module_rows(model)}
    layers = rows["model.layers.0-2"]
    assert (layers["kind"], layers["count"], layers["depth"]) == ("LlamaDecoderLayer", 3, 2)
    assert layers["bytes"] == sum(p.nbytes for p in model.model.layers.parameters())
    assert rows["model.layers.0.self_attn.q_proj"]["shapes"] == "weight [64, 64]"
    assert not any(path.startswith("model.layers.1") for path in rows)


def test_layers_that_read_the_caches_of_others():
    """Of Gemma 3n's five layers the last two do."""
    model = build_model("gemma3n")
    groups = attention_groups(model, attention_specs(model))
    assert [(one["layers"], one["num"], one["shared"]) for one in groups] == [
        ("0-1, 3", 3, {1: "3"}), ("2, 4", 2, {2: "4"}),
    ]  # fmt: skip
    assert "sliding_window 6" in groups[0]["words"]


def test_layers_with_caches_of_their_own():
    model = build_model("gemma2", num_layers=3)
    groups = attention_groups(model, attention_specs(model))
    assert [(one["layers"], one["shared"]) for one in groups] == [("0, 2", {}), ("1", {})]
    assert groups[0]["words"][0].startswith("4 heads, 2 KV heads of ")
