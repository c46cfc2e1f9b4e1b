"""batch_invariant: every product becomes one of ours, in order, or the graph is refused."""

import pytest
import torch
from torch.nn import functional

from fx_passes.config import PassConfig
from fx_passes.failures import RefusedError, refusal
from fx_passes.inductor_slot import AtenPipeline
from fx_passes.ordered import check_ordered

X, W = torch.randn(5, 64), torch.randn(96, 64)


def compiled(aten_graph, function, *args):
    """The graph after all passes."""
    graph = aten_graph(function, *args)
    AtenPipeline(PassConfig(batch_invariant=True).ordered())(graph.graph)
    return str(graph.graph)


@pytest.mark.parametrize("bias", [None, torch.randn(96)])
def test_products_are_ours(aten_graph, bias, monkeypatch):
    monkeypatch.setattr("fx_passes.passes.skinny_products.takes_ordered", lambda *_: True)
    if bias is None:
        text = compiled(aten_graph, functional.linear, X, W)
    else:
        text = compiled(aten_graph, functional.linear, X, W, bias)
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
        compiled(aten_graph, function, *args)
    assert isinstance(refusal(caught.value), RefusedError)


def test_a_product_without_a_sum(aten_graph):
    """RoPE's angles: one number times another."""
    graph = aten_graph(lambda x: x.unsqueeze(2) @ x.unsqueeze(1), X)
    check_ordered(graph.graph, "any")
