"""Pictures of Dynamo graphs: what is drawn, and in which colour.

T rows, R logits rows.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import nn
from torch.nn import functional

import fx_passes
from attn_ops import Attention, CommonAttentionMetadata, PagedKVCache, get_backend
from fx_passes.passes.fast_prefill import FastPrefill
from fx_passes.pictures.flowchart import Box, Chart, Kind, Rows, before_and_after
from fx_passes.pictures.picture import chart_of, mermaid


class Layer(nn.Module):
    """4 query heads and 2 kv heads of 16; without k and v, if it reads another layer's cache."""

    def __init__(self, target: Attention | None) -> None:
        super().__init__()
        self.attn = Attention(4, 2, 16, kv_sharing_target=target)
        self.q_proj, self.o_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        if target is None:
            self.k_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 32)
        self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, h, cache, meta, slots):
        x, k, v = functional.rms_norm(h, (64,)), None, None
        if self.attn.kv_sharing_target is None:
            k, v = self.k_proj(x).view(-1, 2, 16), self.v_proj(x).view(-1, 2, 16)
        out = self.attn(self.q_proj(x).view(-1, 4, 16), k, v, cache, meta, slots)
        h = h + self.o_proj(out.view(-1, 64))
        return h + self.down_proj(functional.silu(self.up_proj(functional.rms_norm(h, (64,)))))


class TinyModel(nn.Module):
    """As in YOCO, the second half of the layers reads the last cache of the first half."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(128, 64), nn.Linear(64, 128)
        owners = [Layer(None) for _ in range(num_layers // 2)]
        sharers = [Layer(owners[-1].attn) for _ in range(num_layers - len(owners))]
        self.layers = nn.ModuleList([*owners, *sharers])
        self.requires_grad_(False)

    def forward(self, input_ids, logits_indices, kv_caches, meta, slots):
        h: torch.Tensor = self.embed_tokens(input_ids)
        for i, layer in enumerate(self.layers):
            h = layer(h, kv_caches[min(i, len(kv_caches) - 1)], meta, slots)
        return self.lm_head(h[logits_indices])


def inputs(model: TinyModel) -> tuple:
    """A prompt of 5 tokens and one of 3: last rows 4 and 7."""
    layers: list[Any] = list(model.layers)
    specs = [layer.attn.spec(torch.float32) for layer in layers]
    own = specs[: len(specs) // 2]
    cache = PagedKVCache(own, num_tokens=64, block_size=4)
    for request, length in enumerate((5, 3)):
        cache.reserve(request, length)
    rows = torch.tensor([4, 7])
    table = cache.block_table([0, 1])
    common = CommonAttentionMetadata.from_lengths([5, 3], [5, 3], table, 4)
    common = common.replace(logits_indices=rows)
    backend = get_backend("TORCH")
    meta = backend.builder(backend, specs, 4, "cpu").build(0, common)
    ids, slots = torch.arange(1, 9), common.slot_mapping.clone()
    for tensor in (ids, rows, slots):
        torch._dynamo.mark_dynamic(tensor, 0)
    return ids, rows, cache.tensors, meta, slots


@pytest.fixture
def charts() -> Callable[..., tuple[Chart, Chart, FastPrefill]]:
    """A model's Dynamo graph before and after the pass; nothing is compiled."""

    def make(model: TinyModel) -> tuple[Chart, Chart, FastPrefill]:
        found: list = []

        def backend(gm, example_inputs):
            one = FastPrefill()
            found.append(chart_of(gm.graph))
            assert chart_of(gm.graph) == found[0]
            one.run(gm.graph)
            found.extend([chart_of(gm.graph), one])
            return gm

        with symbolic_shapes_config.patch(backed_size_oblivious=True):
            torch.compile(model, backend=backend, fullgraph=True)(*inputs(model))
        return tuple(found)

    return make


def drawn(chart: Chart, layer: str | None) -> list[tuple[str, Rows]]:
    return [
        (box.label().replace("<br/>", " "), box.rows) for box in chart.boxes if box.layer == layer
    ]


def test_what_is_drawn(charts):
    before, after, _ = charts(TinyModel())
    assert {box.rows for box in before.boxes if box.layer} == {Rows.ALL}
    assert drawn(before, "layers.1") == [
        ("linear k_proj, v_proj [T, 32]", Rows.ALL),
        ("linear q_proj [T, 64]", Rows.ALL),
        ("write kv_caches_1 [T, 2, 2, 16]", Rows.ALL),
        ("attention attn [T, 4, 16]", Rows.ALL),
        ("linear o_proj [T, 64]", Rows.ALL),
        ("linear up_proj [T, 96]", Rows.ALL),
        ("linear down_proj [T, 64]", Rows.ALL),
    ]
    assert drawn(before, None)[-3:] == [
        ("getitem h [R, 64]", Rows.LOGITS),
        ("linear lm_head [R, 128]", Rows.LOGITS),
        ("output [R, 128]", Rows.LOGITS),
    ]
    rows = dict(drawn(after, "layers.1"))
    assert rows["linear k_proj, v_proj [T, 32]"] is Rows.ALL
    assert rows["write kv_caches_1 [T, 2, 2, 16]"] is Rows.ALL
    assert rows["attention attn [R, 4, 16]"] is Rows.LOGITS
    assert after.layers["layers.0"] == {Rows.ALL}
    assert after.layers["layers.2"] == after.layers["layers.3"] == {Rows.LOGITS}
    assert not any("getitem" in text for text, _ in drawn(after, None))


def test_edges(charts):
    """Attention hangs on q and, through memory, on the write; sharers on no write of their own."""
    _, after, _ = charts(TinyModel())
    boxes = after.boxes
    for i, box in enumerate(boxes):
        assert all(source < i for source in after.sources[i])
        if box.kind is Kind.ATTENTION:
            subjects = {boxes[s].subjects[0] for s in after.sources[i]}
            own = box.layer in ("layers.0", "layers.1")
            assert subjects == ({"q_proj", f"kv_caches_{box.layer[-1]}"} if own else {"q_proj"})
    texts = after.mermaid().splitlines()
    writes = [i for i, box in enumerate(boxes) if box.kind is Kind.WRITE]
    assert len(writes) == 2  # keys and values together
    assert sum("-.->" in line for line in texts) == 2
    assert all(f"n{i} -.->" in "\n".join(texts) for i in writes)


def test_residuals_do_not_join_all_layers(charts):
    for chart in charts(TinyModel(12))[:2]:
        assert sum(map(len, chart.sources)) < 1.5 * len(chart.boxes)


@pytest.mark.slow
def test_equal_layers_are_left_out(charts):
    before, after, _ = charts(TinyModel(24))
    texts = before_and_after(before, after)
    for text in texts:
        assert re.findall(r'subgraph l\d+\["(.*?)"\]', text) == [
            f"layers.{i}" for i in (0, 10, 11, 12, 23)
        ]
        assert "... layers.1 to layers.9, 9 layers" in text
        assert "... layers.13 to layers.22, 10 layers" in text
    assert texts[1].count("]:::logits") > 0
    assert '9 layers"]:::all' in texts[1]
    assert '10 layers"]:::logits' in texts[1]
    assert "layers.5" not in re.sub(r"\.\.\. .*", "", texts[0])
    assert all(f"layers.{i}" in after.mermaid() for i in range(24))


def test_text_is_well_formed(charts):
    for chart in charts(TinyModel(8))[:2]:
        text = chart.mermaid(["layers.0", "layers.7"])
        assert text == chart.mermaid(["layers.0", "layers.7"])
        ids = set(re.findall(r"^ +(\w+)[\[({]", text, re.MULTILINE))
        edges = re.findall(r"^ +(\w+) -\.?->? *>? ?(\w+)$", text.replace("-->", "->"), re.MULTILINE)
        assert edges
        assert {end for edge in edges for end in edge} <= ids
        assert text.count("subgraph") == len(re.findall(r"^ +end$", text, re.MULTILINE))
        assert set(re.findall(r":::(\w+)", text)) == set(re.findall(r"classDef (\w+)", text))


def test_a_graph_without_a_selection(dynamo_run):
    class Nothing(fx_passes.Pass):
        """Draws the graph."""

        name, stage = "nothing", "dynamo"

        def apply(self, graph):
            self.text = mermaid(graph)
            return 0

    one, x = Nothing(), torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    dynamo_run(lambda x, w: (torch.relu(x @ w) + 1, w @ w), one, x, torch.randn(4, 4))
    assert 'n0["matmul<br/>[T, 4]"]:::all' in one.text
    assert 'n1["matmul<br/>[4, 4]"]:::none' in one.text
    assert "logits" not in one.text


def test_labels_are_escaped():
    """Nothing in a name ends a label, begins HTML or Markdown, or is an entity."""
    name = 'a"];<b>&amp;`x`#35;{|}()\\[y]\nend'
    box = Box(Kind.PRODUCT, Rows.ALL, name, "linear", (name, "b"), ("[T, Max(1, T) < 2]",))
    other = dataclasses.replace(box, operator="relu")
    text = Chart([box, other], [(), (0,)]).mermaid()
    quoted = re.findall(r'"([^"]*)"', text)
    assert len(quoted) == 3 + 2  # the layer, two boxes, the legend and its colour
    for label in quoted[:3]:
        names = re.sub(r"#\d+;", "", label.split("<br/>")[0])
        assert not set(names) & set("<>&\"'`#;[]{}|()\\\n")
        entities = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), label.split("<br/>")[0])
        assert entities.removeprefix("linear ").removeprefix("relu ").startswith(name[:-5])
    assert "[T, Max(1, T) #60; 2]" in text
    assert text.count("\n") == len(text.splitlines())
