"""A pass that fails at run time: named with graph and node, and the graph is what it was."""

import pickle

import pytest
import torch
from torch.fx import Graph, symbolic_trace

from fx_passes import Pass, PassConfig, PassError, recording, register_pass
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.observe import graph_text
from fx_passes.pipeline import run_dynamo_stage

pytestmark = pytest.mark.usefixtures("own_pipeline")


class Mine(Pass):
    """Changes what it finds, and then does what a test says."""

    name, stage = "mine", "dynamo"
    looks_for = "sine"

    def apply(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.sin):
            node.target = torch.cos
            graph.owning_module.add_module("added", torch.nn.Identity())
            self.fail(node)
        return 1

    def fail(self, node):
        raise ZeroDivisionError("division by zero")


def model(x):
    return torch.sin(x) + 1


def failing(**attributes):
    return type("Failing", (Mine,), attributes)


def none(self, graph):
    return self.fail(graph)


CASES = {
    "raises": ({}, "at the node 'sin': ZeroDivisionError: division by zero"),
    "without words": ({"fail": lambda self, node: next(iter(()))}, "at the node 'sin': StopIter"),
    "an erased node": (
        {"fail": lambda self, node: node.graph.erase_node(node)},
        "at the node 'sin': RuntimeError: Tried to erase Node sin",
    ),
    "an invalid graph": (
        {"fail": lambda self, node: node.update_arg(0, next(iter(node.users)))},
        "at the node 'sin': RuntimeError: Argument 'add' of Node 'sin' was used before",
    ),
    "None": (
        {"apply": none, "fail": lambda self, graph: None},
        ": TypeError: apply must return its number of matches, an int, got None",
    ),
    "a bool": ({"apply": lambda self, graph: bool(graph)}, ": TypeError: apply must return its"),
    "less than 0": ({"apply": lambda self, graph: -1}, ": ValueError: apply must return at least"),
    "its summary": (
        {"fail": lambda self, node: None, "summary": lambda self: 1 / 0},
        ": ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_pass_graph_and_node(case):
    attributes, message = CASES[case]
    register_pass(failing(**attributes), before="device_constants")
    gm = symbolic_trace(model)
    text = graph_text(gm.graph)
    with (
        recording(),
        pytest.raises(PassError, match="the pass 'mine' failed on the graph 'whole graph'") as seen,
    ):
        run_dynamo_stage(gm, PassConfig())
    assert message in str(seen.value)
    assert graph_text(gm.graph) == text
    assert not hasattr(gm, "added")
    x = torch.randn(3)
    assert torch.equal(gm(x), model(x))
    assert isinstance(pickle.loads(pickle.dumps(seen.value)), PassError)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"of": classmethod(lambda cls, config: None)}, "TypeError: of must return a Pass, got No"),
        ({"of": classmethod(lambda cls, config: 1 / 0)}, "ZeroDivisionError"),
        ({"settings": lambda self: None}, "AttributeError"),
        ({"source": lambda self: 1 / 0}, "ZeroDivisionError"),
    ],
    ids=["of returns None", "of raises", "no settings", "no source"],
)
def test_the_cache_key_names_the_pass(attributes, message):
    register_pass(failing(stage="aten", **attributes))
    with pytest.raises(PassError, match=f"the pass 'mine' failed: {message}"):
        AtenPipeline(PassConfig()).uuid()


# -- a changed graph has matches -------------------------------------------------------------------


def erase(graph):
    graph.erase_node(graph.call_function(torch.sin, (next(iter(graph.nodes)),)))


CHANGES = {
    "a target": (lambda graph, sin, add: setattr(sin, "target", torch.cos), 1),
    "an argument": (lambda graph, sin, add: add.update_arg(1, 2), 1),
    "a new node": (lambda graph, sin, add: graph.call_function(torch.sin, (sin,)), 1),
    "the order": (lambda graph, sin, add: sin.prepend(graph.get_attr("a")), 1),
    "nothing": (lambda graph, sin, add: None, 0),
    "nothing in the end": (lambda graph, sin, add: erase(graph), 0),
    "the same argument": (lambda graph, sin, add: add.update_arg(1, 1), 0),
    "a note": (lambda graph, sin, add: sin.meta.update(seen=True), 0),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_graph_has_matches(case):
    change, matches = CHANGES[case]

    class Silent(Pass):
        name, stage = "silent", "dynamo"

        def apply(self, graph: Graph) -> int:
            sin, add = list(graph.nodes)[1:3]
            change(graph, sin, add)
            return 0

    gm = symbolic_trace(model)
    gm.a = torch.nn.Parameter(torch.ones(1))
    assert Silent().run(gm.graph) == matches
