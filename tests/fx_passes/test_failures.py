"""A pass that fails at run time: named with graph and node, and the graph is what it was."""

import pickle
import re

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph, symbolic_trace

from fx_passes import Pass, PassConfig, PassError, attn_ops, pipeline, recording, register_pass
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.observe import graph_text
from fx_passes.pipeline import run_dynamo_stage

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_pipeline(monkeypatch):
    monkeypatch.setattr(pipeline, "_PIPELINE", list(pipeline._PIPELINE))


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


def test_through_torch_compile():
    register_pass(Mine)
    with pytest.raises(BackendCompilerFailed, match="the pass 'mine' failed on the graph") as seen:
        torch.compile(lambda x: model(x), backend=attn_ops)(torch.randn(3))
    assert isinstance(seen.value.inner_exception, PassError)
    assert isinstance(seen.value.inner_exception.__cause__, ZeroDivisionError)


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


# -- what a pass must keep ------


class Breaking(Pass):
    """Does to the graph's output, or to its writes, what a test says."""

    name, stage = "breaking", "aten"

    def apply(self, graph):
        self.change(graph, graph.output_node())
        return 1


def doubled(x, kept):
    kept.copy_(x.sin() * 2)
    kept.add_(1)
    return x.cos(), (x + 1).t()


def replaced(make):
    """The first output is replaced."""

    def change(self, graph, output):
        node = output.args[0][-2]
        with graph.inserting_before(output):
            output.replace_input_with(node, make(graph, node))

    return change


def unwritten(self, graph, output):
    (write,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    write.replace_all_uses_with(write.args[1])
    graph.erase_node(write)


BROKEN = {
    "dtype": (
        replaced(lambda g, n: g.call_function(aten._to_copy.default, (n,), {"dtype": torch.half})),
        r"output \d of the graph must be torch.float32 \[.*\] .*, got torch.float16",
    ),
    "shape": (
        replaced(lambda g, n: g.call_function(aten.select.int, (n, 1, 0))),
        r"output \d of the graph must be .*, \w+\] of strides .*, got torch.float32 \[\w+\] of str",
    ),
    "strides": (
        replaced(lambda g, n: g.call_function(
            aten.as_strided.default, (n, [4, 8], [1, 4]))),
        "output .* of strides .*, got .* of strides",
    ),
    "fewer": (
        lambda self, graph, output: output.update_arg(0, tuple(output.args[0][:-1])),
        "the graph must return 2 values, got 1|must return 3 values, got 2",
    ),
    "no write": (unwritten, "the graph must write .*aten.copy_.default.* in this order, got"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_outputs_and_writes_stay(case):
    change, message = BROKEN[case]
    register_pass(type("Breaks", (Breaking,), {"change": change}), after="share_products")
    x, kept = torch.randn(4, 8), torch.zeros(4, 8)
    with pytest.raises(BackendCompilerFailed, match="the pass 'breaking' failed on the gr") as seen:
        torch.compile(lambda *given: doubled(*given), backend=attn_ops, dynamic=True)(x, kept)
    assert re.search(message, str(seen.value.inner_exception)), seen.value
    assert not kept.any(), "nothing ran"


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
