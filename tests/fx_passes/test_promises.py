"""What a pass on the Dynamo graph must keep, what its error says, and what is no breach."""

import re

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

import graphs
from fx_passes import Pass, PassConfig, PassError, attn_ops, pipeline, recording, register_pass
from fx_passes.observe import graph_text
from fx_passes.pipeline import run_dynamo_stage

pytestmark = pytest.mark.usefixtures("own_pipeline")
aten = torch.ops.aten


class Breaking(Pass):
    """Does to the Dynamo graph what a test says."""

    name, stage = "breaking", "dynamo"

    def apply(self, graph):
        self.change(graph, graph.output_node())
        return 1


def breaking(change, **attributes) -> type[Pass]:
    return type("Breaks", (Breaking,), {"change": staticmethod(change), **attributes})


def model(x, first, second):
    first.copy_(x.sin())
    second[0] = x[0]
    first.add_(1)
    return x.cos(), (x + 1).t()


def inputs():
    return torch.randn(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)


def replaced(make):
    """`x.cos()` is replaced as an output."""

    def change(graph, output):
        (node,) = graph.find_nodes(op="call_method", target="cos")
        with graph.inserting_after(node):
            new = make(graph, node)
        output.replace_input_with(node, new)

    return change


def called(name, *more):
    return replaced(lambda graph, node: graph.call_method(name, (node, *more)))


def unwritten(graph, output):
    (write,) = graph.find_nodes(op="call_method", target="copy_")
    graph.erase_node(write)


def reordered(graph, output):
    (write,) = graph.find_nodes(op="call_method", target="copy_")
    (add,) = graph.find_nodes(op="call_method", target="add_")
    add.append(write)


def fewer(graph, output):
    output.args = (tuple(output.args[0][:-1]),)


BROKEN = {
    "dtype": (called("half"), r"at the node 'half': ValueError: output 0 of the graph must be "
              r"torch.float32 \[.*\] .*, got torch.float16"),
    "shape": (called("unsqueeze", 0), r"output 0 of .* must be torch.float32 \[.*, got torch.fl"),
    "strides": (called("as_strided", [4, 8], [1, 4]), r"strides \[8, 1\] .*, got .*\[1, 4\]"),
    "no number": (replaced(lambda graph, node: 3), "output 0 of the graph must be .*, got 3"),
    "fewer": (fewer, "the graph must return 2 values, got 1"),
    "no write": (unwritten, r"the graph must write \[\('copy_', .*\] in this order, got"),
    "another order": (reordered, r"at the node 'add_': ValueError: the graph must write"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_outputs_and_writes_stay(case):
    change, message = BROKEN[case]
    check_outputs_and_writes(breaking(change), message)


def unwritten_aten(graph, output):
    (write,) = graph.find_nodes(op="call_function", target=aten.copy_.default)[:1]
    write.replace_all_uses_with(write.args[1])
    graph.erase_node(write)


def halved_aten(graph, output):
    node = output.args[0][-2]
    with graph.inserting_before(output):
        new = graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.half})
    output.replace_input_with(node, new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (halved_aten, r"output \d of the graph must be torch.float32 .*, got torch.float16"),
        (unwritten_aten, "the graph must write .*aten.copy_.default.* in this order, got"),
    ],
)
def test_outputs_and_writes_of_aten_graphs_stay(change, message):
    """Of any sizes; their forms are found as those of the Dynamo graph."""
    check_outputs_and_writes(breaking(change, stage="aten"), message, dynamic=True)


def check_outputs_and_writes(one, message, **how):
    register_pass(one)
    given = inputs()
    with pytest.raises(BackendCompilerFailed, match="the pass 'breaking' failed on the gr") as seen:
        torch.compile(lambda *given: model(*given), backend=attn_ops, **how)(*given)
    assert isinstance(seen.value.inner_exception, PassError)
    assert re.search(message, str(seen.value.inner_exception)), seen.value
    assert not given[1].any(), "nothing ran"


def test_promises_are_checked_where_the_user_asks(monkeypatch):
    monkeypatch.setattr(pipeline, "is_checked", lambda config: config.check_passes)
    register_pass(breaking(called("half")))
    function = torch.compile(lambda *given: model(*given), backend=attn_ops)
    assert function(*inputs())[0].dtype == torch.float16
    torch._dynamo.reset()
    asked = torch.compile(
        lambda *given: model(*given), backend=attn_ops, options={"check_passes": True}
    )
    with pytest.raises(BackendCompilerFailed, match="the pass 'breaking' failed on the gr"):
        asked(*inputs())


def test_a_value_that_reads_a_changed_one_is_computed_anew():
    """The pass changes a node in the middle, whose values it does not note again."""

    def change(graph, output):
        (sin,) = graph.find_nodes(op="call_method", target="sin")
        with graph.inserting_after(sin):
            double = graph.call_method("double", (sin,))
        sin.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)

    register_pass(breaking(change))
    with pytest.raises(BackendCompilerFailed, match=r"output 0 .* got torch.float64"):
        torch.compile(lambda x: x.sin().exp().view(2, 4), backend=attn_ops)(torch.ones(8))


def test_writes_of_layers_that_are_cut_out():
    """A pass behind `outline_layers` erases a write inside of a layer."""

    class Layer(torch.nn.Module):
        def forward(self, x, cache):
            cache.add_(1)
            return x.relu() + cache

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, x, caches):
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache)
            return x

    def change(graph, output):
        inner = graph.owning_module.layer_0.graph
        (write,) = inner.find_nodes(op="call_method", target="add_")
        write.replace_all_uses_with(write.args[0])
        inner.erase_node(write)

    caches = [torch.zeros(3), torch.zeros(3)]
    register_pass(breaking(change), after="outline_layers")
    with pytest.raises(BackendCompilerFailed, match=r"must write \[\('add_', .*, got \[\]"):
        torch.compile(Model(), backend=attn_ops)(torch.ones(3), caches)
    assert not any(cache.any() for cache in caches)


def test_autocast_is_no_breach():
    """Values are computed anew in the autocast that the model is called in."""

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).float()
            return x.half(), torch.vmap(torch.dot)(x, x)

    x, function = torch.randn(3, 8), Layers().eval().requires_grad_(False)
    with recording() as recorder, torch.autocast("cpu", torch.bfloat16):
        got = torch.compile(function, backend=attn_ops)(x)
        torch.testing.assert_close(got, function(x))
    assert recorder.matches()["outline_layers"] == 2


def test_a_change_inside_autocast_is_no_breach():
    def change(graph, output):
        (linear,) = graph.find_nodes(op="call_function", target=torch._C._nn.linear)
        linear.update_arg(0, linear.args[0].args[0])

    register_pass(breaking(change))

    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.linear(x.clone(), w)

    x, w = torch.randn(3, 8), torch.randn(8, 8)
    got = torch.compile(lambda x, w: function(x, w), backend=attn_ops)(x, w)
    torch.testing.assert_close(got, function(x, w))


def test_a_number_of_the_run_is_no_breach():
    """A pass changes what a size depends on that only the run tells."""

    def change(graph, output):
        (relu,) = graph.find_nodes(op="call_method", target="relu")
        relu.target = "abs"

    register_pass(breaking(change))
    x = torch.tensor([0.0, 1.0, -2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(lambda x: x.relu().nonzero() + 1, backend=attn_ops)(x)
    assert got.tolist() == [[2], [3]]


def test_the_error_names_the_dump_that_holds_the_graph(tmp_path):
    register_pass(breaking(called("half")), before="device_constants")
    with (
        pytest.raises(BackendCompilerFailed) as seen,
        graphs.dump(tmp_path / "here"),
        recording(),
    ):
        torch.compile(lambda *given: model(*given), backend=attn_ops)(*inputs())
    assert f"; the dump in {tmp_path / 'here'} has its graph" in str(seen.value)
    before, after = sorted((tmp_path / "here" / "passes").iterdir(), reverse=True)
    assert "half" not in before.read_text()
    assert "half" in after.read_text()
    index = (tmp_path / "here" / "index.md").read_text()
    assert (
        "pass `breaking` on graph `whole graph`: matches 0: no place for it; failed with " in index
    )


def test_a_graph_that_cannot_be_printed_is_noted_too(tmp_path):
    def change(graph, output):
        output.args = (graph,)
        raise ZeroDivisionError

    register_pass(breaking(change), before="device_constants")
    with pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"), graphs.dump(tmp_path):
        torch.compile(lambda *given: model(*given), backend=attn_ops)(*inputs())
    assert "failed with ZeroDivisionError" in (tmp_path / "index.md").read_text()


@pytest.mark.parametrize("stage", ["dynamo", "aten"])
def test_the_graph_that_the_backend_was_given_stays(stage):
    """Whoever calls the backend may compile the graph by other means."""
    layers = (torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()) for _ in range(2))
    layers = torch.nn.Sequential(*layers)

    def change(graph, output):
        raise ZeroDivisionError

    register_pass(breaking(change, stage=stage))
    texts = []

    def backend(gm: GraphModule, example_inputs):
        before, modules = graph_text(gm.graph), set(gm._modules)
        with pytest.raises(Exception, match="the pass 'breaking' failed"):
            attn_ops(gm, example_inputs)
        texts.append((graph_text(gm.graph), before))
        assert set(gm._modules) == modules
        return gm

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(layers, backend=backend)(x), layers(x))
    assert texts[0][0] == texts[0][1]


def test_an_interrupt_leaves_the_graph_as_it_was():
    def change(graph, output):
        graph.erase_node(graph.output_node())
        raise KeyboardInterrupt

    register_pass(breaking(change))
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    text = graph_text(gm.graph)
    with pytest.raises(KeyboardInterrupt):
        run_dynamo_stage(gm, PassConfig())
    assert graph_text(gm.graph) == text
