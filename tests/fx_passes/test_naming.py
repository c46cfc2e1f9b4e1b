"""Graphs are named by what they compute; matches are told by graph, and with a reason for none."""

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fx_passes import Pass, attn_ops, recording
from fx_passes.naming import GraphName, name_of, names_of_pieces, safe_name
from fx_passes.observe import PassRecord, Recorder

EMBED, LINEAR = nn.functional.embedding, nn.functional.linear
ATTEND = torch.ops.attn_ops.attention.default


def graph_of(*targets) -> Graph:
    graph = Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value, value))
    graph.output(value)
    return graph


def called(*pieces: tuple[str, tuple]) -> GraphModule:
    """A module that calls submodules of these operators in order."""
    owner, graph = nn.Module(), Graph()
    value = graph.placeholder("x")
    for name, targets in pieces:
        owner.add_module(name, GraphModule(nn.Module(), graph_of(*targets)))
        value = graph.call_module(name, (value,))
    graph.output(value)
    return GraphModule(owner, graph)


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        ((EMBED, LINEAR, ATTEND, LINEAR), "whole model"),
        ((torch.ops.aten.embedding.default, ATTEND), "whole model"),
        ((LINEAR, ATTEND), "decoder layer"),
        ((ATTEND, LINEAR, ATTEND), "2 decoder layers"),
        ((EMBED, torch.relu), "embedding"),
        ((LINEAR, torch.relu), "whole graph"),
        ((), "whole graph"),
    ],
)
def test_a_graph_by_itself(targets, name):
    assert name_of(graph_of(*targets)) == GraphName(name)


LAYER, OTHER = ("layer_0", (LINEAR, ATTEND)), ("layer_1", (LINEAR, ATTEND, torch.relu))


@pytest.mark.parametrize(
    ("pieces", "names"),
    [
        (
            [("rest_0", (EMBED,)), LAYER, LAYER, LAYER, ("rest_1", (torch.relu, LINEAR))],
            ["embedding", "decoder layer", "head"],
        ),
        (
            [("a", (torch.relu,)), LAYER, LAYER, ("b", (LINEAR,)), LAYER, ("c", (torch.relu,))],
            ["before the layers", "decoder layer", "between the layers", "after the layers"],
        ),
        (
            [("a", (EMBED, ATTEND)), LAYER, LAYER, ("b", (ATTEND,)), OTHER, OTHER],
            [
                "embedding and decoder layer",
                "decoder layer 1",
                "decoder layer 2",
                "decoder layer 3",
            ],
        ),
        (
            [("layer_0", (LINEAR,)), ("layer_0", (LINEAR,)), ("b", (ATTEND, ATTEND, LINEAR))],
            ["layer", "2 decoder layers and head"],
        ),
    ],
    ids=["usual", "places", "several kinds", "no attention"],
)
def test_pieces(pieces, names):
    found = names_of_pieces(called(*pieces))
    counts = [[name for name, _ in pieces].count(target) for target in found]
    assert list(found.values()) == [GraphName(*one) for one in zip(names, counts, strict=True)]


def test_names_are_safe_in_files():
    assert safe_name("embedding and decoder layer 2") == "embedding_and_decoder_layer_2"
    assert safe_name("../a\\b\n") == "a_b"
    assert safe_name("..") == "graph"
    assert len(safe_name("x" * 1000)) == 80


def records(*found: tuple[str, int, int, list[str]]) -> Recorder:
    return Recorder(
        passes=[
            PassRecord("one", "aten", name, matches, [], calls, reasons, looks_for="equal products")
            for name, calls, matches, reasons in found
        ]
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([("whole model", 1, 3, [])], "3"),
        ([("embedding", 1, 0, []), ("decoder layer", 32, 1, [])], "1 x 32 layers"),
        (
            [("embedding", 1, 2, []), ("decoder layer", 32, 1, []), ("head", 1, 0, ["no"])],
            "2 in embedding, 1 x 32 layers",
        ),
        ([("whole model", 1, 0, [])], "0: no equal products"),
        ([("a", 1, 0, ["x", "y"]), ("b", 9, 0, ["y"])], "0: y"),
    ],
)
def test_matches_in_words(found, words):
    recorder = records(*found)
    assert recorder.matches_in_words() == {"one": words}
    if len(found) == 1:
        assert recorder.passes[0].matches_in_words() == words


def test_a_reason_is_counted_without_its_place():
    class Reluctant(Pass):
        name, stage = "reluctant", "dynamo"

        def apply(self, graph):
            self.skip("it is too small", "layers.0")
            self.skip("it has no weights", "layers.1")
            self.skip("it has no weights", "layers.2")
            return 0

    one = Reluctant()
    one.run(Graph())
    assert one.skipped[2] == "layers.2: it has no weights"
    record = PassRecord(one.name, one.stage, "whole model", 0, one.skipped, reasons=one.reasons)
    assert record.matches_in_words() == "0: it has no weights"


def test_an_outlined_model():
    """A layer's matches are those of one layer, of how many; printing a graph changes nothing."""
    model = nn.Sequential(
        nn.Embedding(8, 8),
        *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)),
    ).requires_grad_(False)
    wanted = model(torch.arange(4))
    with recording(Recorder(texts=True)) as recorder:
        got = torch.compile(model, backend=attn_ops, fullgraph=True)(torch.arange(4))
    torch.testing.assert_close(got, wanted)
    outlined = next(r for r in recorder.passes if r.pass_name == "outline_layers")
    assert ("layer_0(" in outlined.before, "layer_0(" in outlined.after) == (False, True)
    assert [name for name, _ in recorder.final_graphs] == ["embedding", "layer"]
    assert {r.graph_name for r in recorder.passes if r.stage == "dynamo"} == {"embedding"}
    words = recorder.matches_in_words()
    assert words["outline_layers"] == "3"
    assert words["share_products"] == "0: no equal products"
    layers = [r for r in recorder.passes if r.graph_name == "layer"]
    assert layers
    assert {r.num_calls for r in layers} == {3}
