"""batch_invariant: every product becomes one of ours, in order, or the graph is refused."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.nn import functional

import attn_ops.ops.products.fused_products as fused
import attn_ops.ops.products.skinny_mm as skinny
from attn_ops.ops import collectives
from fx_passes import Recorder, recording
from fx_passes.config import PassConfig
from fx_passes.failures import RefusedError, refusal
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.ordered import check_ordered, order_norms
from graphs import DecodeSession
from tests.kit.marks import long, slow
from tests.kit.models import build_model

X, W = torch.randn(5, 64), torch.randn(96, 64)


def rewritten(aten_graph, function, *args):
    """The graph after all passes."""
    graph = aten_graph(function, *args)
    AtenPipeline(PassConfig(batch_invariant=True).ordered())(graph.graph)
    return str(graph.graph)


@pytest.mark.parametrize("bias", [None, torch.randn(96)])
def test_products_are_ours(aten_graph, bias, monkeypatch):
    monkeypatch.setattr("fx_passes.passes.skinny_products.takes_ordered", lambda *_: True)
    if bias is None:
        text = rewritten(aten_graph, functional.linear, X, W)
    else:
        text = rewritten(aten_graph, functional.linear, X, W, bias)
    assert "attn_ops.skinny_mm" in text
    assert "ordered: True" in text
    assert "aten.mm" not in text


@pytest.mark.parametrize(
    ("function", "args", "named"),
    [
        (lambda x: x.unsqueeze(1) @ x.unsqueeze(2), (X,), "aten.bmm.default"),
        (functional.linear, (X, W), "aten.mm.default"),
        (lambda x, w: functional.conv1d(x.unsqueeze(1), w), (X, W[:4, None, :3]), "convolution"),
    ],
)
def test_others_are_refused(aten_graph, function, args, named):
    with pytest.raises(Exception, match=f"batch_invariant must be False.*{named}") as caught:
        rewritten(aten_graph, function, *args)
    assert isinstance(refusal(caught.value), RefusedError)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("named", ["experts", "skinny_mm"])
def test_ours_are_refused_where_nobody_asked_for_an_order(named, ordered):
    """A model may call them itself; without `ordered` they may leave a sum to a library."""
    graph, more = Graph(), {"ordered": True} if ordered else {}
    number = {"experts": 5, "skinny_mm": 2}[named]
    operator = getattr(torch.ops.attn_ops, named).default
    inputs = [graph.placeholder(f"x{i}") for i in range(number)]
    for one in inputs:
        one.meta["val"] = X
    graph.output(graph.call_function(operator, tuple(inputs), more))
    if ordered:
        return check_ordered(graph, "any")
    with pytest.raises(RefusedError, match=f"batch_invariant must be False.*{named}"):
        check_ordered(graph, "any")


def sum_over_ranks(operator, *args):
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3, 16, dtype=torch.bfloat16, device="cuda")
    graph.output(graph.call_function(operator.default, (x, *args)))
    return graph


@pytest.mark.parametrize("shared", [None, object()], ids=["apart", "shared"])
def test_sums_over_ranks_are_refused_but_ours(monkeypatch, shared):
    """Libraries choose their order by the size, which is that of the batch."""
    monkeypatch.setattr(collectives, "shared_memory", lambda group, device: shared)
    theirs = sum_over_ranks(torch.ops._c10d_functional.all_reduce, "sum", "group")
    ours = sum_over_ranks(torch.ops.attn_ops.all_reduce, "group")
    for graph in (theirs, ours) if shared is None else (theirs,):
        with pytest.raises(RefusedError, match=r"batch_invariant must be False for.*all_reduce"):
            check_ordered(graph, "any")
    if shared is not None:
        check_ordered(ours, "any")


def norm(x, weight, wide=False):
    """As Llama's and, with `wide`, as Gemma's."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + weight.float())).type_as(x) if wide else weight * y.to(x.dtype)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_ours(aten_graph, dtype, wide):
    x, weight = X.to(dtype), W[0].to(dtype)

    def function(x, weight):
        first = norm(x, weight, wide)
        total = x + first.sin()
        return norm(total, weight, wide).unflatten(-1, (4, 16)), total * 2

    graph = aten_graph(function, x, weight)
    order_norms(graph.graph)
    text = str(graph.graph)
    assert "attn_ops.rms_norm" in text
    assert "attn_ops.add_rms_norm" in text
    assert "rsqrt" not in text
    graph.recompile()
    for got, want in zip(graph(x, weight), function(x, weight), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_sum_that_is_read_before_its_norm(aten_graph):
    def function(x, weight):
        total = x + x.sin()
        early = total * 3
        return early + norm(total, weight), total.cos()

    graph = aten_graph(function, X, W[0])
    order_norms(graph.graph)
    graph.recompile()
    for got, want in zip(graph(X, W[0]), function(X, W[0]), strict=True):
        torch.testing.assert_close(got, want)


def test_a_product_without_a_sum(aten_graph):
    """RoPE's angles: one number times another."""
    graph = aten_graph(lambda x: x.unsqueeze(2) @ x.unsqueeze(1), X)
    check_ordered(graph.graph, "any")


# -- real models -----------------------------------------------------------------------------------

PASSES = ("skinny_products.takes_ordered", "rms_norms.takes_ordered")
SUMS = ("aten.mean", "aten.sum", "aten.var_mean", "aten.rsqrt", "aten.mm", "aten.addmm", "aten.bmm")


@pytest.mark.parametrize("name", ["qwen3", *slow("gemma3"), *long("llama", "gemma2", "phi3")])
def test_no_sum_is_left(name, monkeypatch):
    """As on a Hopper GPU, whose products are stood for by PyTorch's."""
    for one in PASSES:
        monkeypatch.setattr(f"fx_passes.passes.{one}", lambda *_: True)
    for module in (fused, skinny):
        monkeypatch.setattr(module, "ordered_product", lambda x, w, b: skinny.product(x, w, b))
    torch._dynamo.reset()
    model = build_model(name, dtype=torch.bfloat16)
    compiled = torch.compile(
        model, backend="attn_ops", fullgraph=True, options={"batch_invariant": True}
    )
    with recording(Recorder(texts=True)) as recorder:
        DecodeSession(compiled, max_batch_size=2, max_tokens=32).generate([[1, 2, 3]], 4)
    assert recorder.final_graphs
    for _, text in recorder.final_graphs:
        left = [line for line in text.splitlines() if any(f"{s}." in line for s in SUMS)]
        assert not left
