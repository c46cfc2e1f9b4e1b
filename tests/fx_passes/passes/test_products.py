"""share_products: what it merges and leaves alone; only the count of products changes."""

import pytest
import torch

from fx_passes import attn_ops
from fx_passes.passes.products import ShareProducts

aten = torch.ops.aten


def test_addmm(aten_graph, contract):
    def function(x, b, w):
        return (
            aten.addmm(b, x, w).relu(),
            aten.addmm(b, x, w).sin(),
            aten.addmm(b, x, w, beta=2).cos(),
        )

    args = torch.randn(3, 8), torch.randn(4), torch.randn(8, 4)
    _, after = contract(ShareProducts(), aten_graph(function, *args), *args, matches=1)
    assert after.count("aten.addmm.default") == 2


DIFFERENT = {
    "weight": lambda x, w, u: (x @ w, x @ u),
    "input": lambda x, w, u: (x @ w, (x + 1) @ w),
    "order": lambda x, w, u: (x @ (u @ w), w @ u),
    "columns": lambda x, w, u: (x @ w[:, :4], x @ w[:, 4:]),
    "transposed": lambda x, w, u: (x @ w, x @ w.t()),
    "beta": lambda x, w, u: (aten.addmm(u, u, w, beta=1), aten.addmm(u, u, w, beta=2)),
    "bool is not int": lambda x, w, u: (
        aten.addmm(u, u, w, alpha=1),
        aten.addmm(u, u, w, alpha=1.5),
    ),
    "rows": lambda x, w, u: (x[:2] @ w, x[1:] @ w),
    "dtype": lambda x, w, u: ((x @ w).sum(), x.double() @ w.double()),
}


@pytest.mark.skipped_when(ShareProducts, "the products differ in any argument")
@pytest.mark.parametrize("case", DIFFERENT)
def test_skipped_when_products_differ_in_any_argument(aten_graph, contract, case):
    args = torch.randn(3, 8), torch.randn(8, 8), torch.randn(8, 8)
    before, after = contract(ShareProducts(), aten_graph(DIFFERENT[case], *args), *args, matches=0)
    for product in ("aten.mm.default", "aten.addmm.default"):
        assert before.count(product) == after.count(product)


def test_other_operators_are_not_merged(aten_graph, contract):
    """Only products and views: two random tensors, or two clones, are two."""

    def function(x):
        return x.clone(), x.clone(), torch.rand_like(x) * 0, torch.rand_like(x) * 0

    x = torch.randn(3)
    before, after = contract(ShareProducts(), aten_graph(function, x), x, matches=0)
    assert before == after


def test_equal_views_alone_are_left(aten_graph, contract):
    """No product is computed twice: nothing changes, and nothing is counted."""

    def function(x, w):
        return (
            aten.view(x, [-1]).sin(),
            aten.view(x, [-1]).cos(),
            aten.view(x, [-1]).view(-1, 8) @ w,
        )

    x, w = torch.randn(3, 8), torch.randn(8, 4)
    before, after = contract(ShareProducts(), aten_graph(function, x, w), x, w, matches=0)
    assert before.count("aten.view.default") > 2
    assert before == after


def test_a_merged_model_has_one_product_a_group(make_model, make_prompts):
    from attn_ops.integrations.merged import merge_projections
    from fx_passes import attn_ops, recording

    model = make_model(num_layers=1)
    keywords = make_prompts(model, [3, 2]).keywords
    wanted = model(**keywords).logits
    assert merge_projections(model) == 2
    with recording() as recorder, torch.no_grad():
        got = torch.compile(model, backend=attn_ops, fullgraph=True)(**keywords).logits
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert recorder.matches()["share_products"] == 3  # k, v and up take the product of q and gate
    num_products = sum(text.count("aten.mm.default(") for _, text in recorder.final_graphs)
    assert num_products == 5  # qkv, o, gate_up, down, head


def test_what_leads_to_equal_products_goes_with_them(aten_graph, contract):
    """A quantization of x that each of its readers was traced with."""

    def function(x, w):
        return [((x / x.abs().amax(1, keepdim=True)) @ w)[:, i : i + 4] for i in (0, 4)]

    args = torch.randn(3, 8), torch.randn(8, 8)
    before, after = contract(ShareProducts(), aten_graph(function, *args), *args, matches=1)
    assert (before.count("aten.amax.default"), after.count("aten.amax.default")) == (2, 1)
    assert (before.count("aten.div.Tensor"), after.count("aten.div.Tensor")) == (2, 1)


@pytest.mark.skipped_when(
    ShareProducts,
    "an operator between them writes in place, and more than views lead to the products",
)
def test_skipped_when_an_operator_writes_in_place(aten_graph):
    """What is read before and after a write differs."""
    args = torch.randn(3, 8), torch.randn(8, 8)
    graph = aten_graph(lambda x, w: ((x + 1) @ w, (x + 1) @ w), *args).gm.graph
    one, other = (node for node in graph.nodes if node.target is aten.add.Tensor)
    with graph.inserting_before(other):
        graph.call_function(aten.add_.Tensor, (one.args[0], 1))
    assert ShareProducts().apply(graph) == 0


def test_a_write_behind_the_products_does_not_matter(aten_graph):
    """As that of the cache, which functional graphs have at their end."""
    args = torch.randn(3, 8), torch.randn(8, 8)
    graph = aten_graph(lambda x, w: (((x + 1) @ w).sin(), ((x + 1) @ w).cos()), *args).gm.graph
    with graph.inserting_before(graph.output_node()):
        x = next(node for node in graph.nodes if node.op == "placeholder" and node.users)
        graph.call_function(aten.copy_.default, (x, x))
    assert ShareProducts().apply(graph) == 1


@pytest.mark.skipped_when(ShareProducts, "both are returned")
@pytest.mark.parametrize(
    ("function", "matches"),
    [
        (lambda x, w: (x @ w, x @ w), 0),
        (lambda x, w: ((x @ w)[:, :6], (x @ w)[:, 4:].unsqueeze(0)), 0),
        (lambda x, w: ((x @ w)[1:], (x @ w)[:-1]), 0),
        (lambda x, w: (x @ w, (x @ w).diagonal()), 0),
        (lambda x, w: ((x @ w)[:, :6], (x @ w).view(torch.int32)[:, 4:]), 0),
        (lambda x, w: ((x @ w)[:, :4].unflatten(1, (2, 2)), (x @ w)[:, 4:]), 1),
        (lambda x, w: (x @ w, (x @ w).relu()), 1),
    ],
)
def test_skipped_when_both_are_returned(aten_graph, contract, function, matches):
    """A caller that writes to one result must not change the other."""
    args = torch.randn(3, 8), torch.randn(8, 8)
    contract(ShareProducts(), aten_graph(function, *args), *args, matches=matches)
    first, second = torch.compile(function, backend=attn_ops)(*args)
    before = second.clone()
    first.add_(1)
    assert torch.equal(second, before)


def test_zeros_of_two_signs_are_not_shared(aten_graph, contract):
    """They are equal, but what is divided by them is not."""

    def function(x, w):
        return aten.mm(aten.div(x, 0.0), w), aten.mm(aten.div(x, -0.0), w)

    x, w = torch.ones(2, 4), torch.ones(4, 4)
    contract(ShareProducts(), aten_graph(function, x, w), x, w, matches=0)
