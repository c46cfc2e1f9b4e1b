"""collapse_views: chains of views of a product become one; what stays; outputs are independent."""

import re

import pytest
import torch

from fx_passes.passes.views import CollapseViews

aten = torch.ops.aten


def project(x, w):
    """The docstring's chain, as model code takes k out of a merged product."""
    mm = aten.mm(x, w)
    view = aten.view(aten.slice(mm, 1, 4, 8), [1, x.shape[0], 2, 2])
    return aten.permute(view, [0, 2, 1, 3]).sin(), mm.cos()


@pytest.fixture
def x_w():
    return torch.randn(3, 8), torch.randn(8, 12)


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_one_graph_serves_any_number_of_rows(aten_graph, num_rows):
    w = torch.randn(8, 12)
    gm = aten_graph(project, torch.randn(5, 8), w)
    assert CollapseViews().run(gm.graph) == 1
    gm.recompile()
    x = torch.randn(num_rows, 8)
    torch.testing.assert_close(gm(x, w), project(x, w), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("split", "offset"),
    [
        (lambda mm: aten.split_with_sizes(mm, [8, 4], 1)[1], 8),
        (lambda mm: aten.split(mm, 4, 1)[1], 4),
        (lambda mm: aten.unbind(aten.view(mm, [mm.shape[0], 3, 4]), 1)[2], 8),
    ],
)
def test_parts_of_a_split_are_views(aten_graph, contract, x_w, split, offset):
    """As latent attention takes the rotated part of its key."""

    def function(x, w):
        return aten.view(split(aten.mm(x, w)), [1, x.shape[0], 2, 2]).sin()

    _, after = contract(CollapseViews(), aten_graph(function, *x_w), *x_w, matches=1)
    assert re.search(
        rf"as_strided.default\(mm, \[1, \w+, 2, 2\], \[1, 12, 2, 1\], {offset}\)", after
    )
    assert "split" not in after
    assert "unbind" not in after


def back_to_the_product(x, w):
    return aten.view(aten.view(aten.mm(x, w), [x.shape[0], 3, 4]), [x.shape[0], 12]).sin()


def contiguous(x, w):
    return aten.view(aten.unsqueeze(aten.mm(x, w), 0), [1, x.shape[0], 3, 4]).sin()


def copied(x, w):
    return aten.clone(aten.mm(x, w)).sin()


def twice_the_rows(x, w):
    return aten.permute(aten.view(aten.mm(x, w), [x.shape[0] * 2, 2, 3]), [1, 0, 2]).sin()


def concatenated(x, w):
    """GPT-OSS rotates q and k by concatenating halves; its rows are not the first dimension."""
    heads = aten.permute(aten.view(x + 1, [1, x.shape[0], 2, 4]), [0, 2, 1, 3])
    turned = aten.cat([aten.slice(heads, 3, 2, 4), aten.slice(heads, 3, 0, 2)], 3)
    return aten.squeeze(aten.permute(turned, [0, 2, 1, 3]), 0).sin()


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        (back_to_the_product, "aten.view"),
        (contiguous, "unsqueeze"),
        (copied, "clone"),
        (twice_the_rows, "permute"),
        (concatenated, "squeeze"),
    ],
)
def test_collapsed(aten_graph, contract, x_w, function, gone):
    _, after = contract(CollapseViews(), aten_graph(function, *x_w), *x_w, matches=1)
    assert gone not in after
    assert (after.count("aten.view.default") == 1) == (function in (contiguous, concatenated))


SKIPPED = {
    "another size": lambda x, w: aten.permute(
        aten.view(aten.slice(aten.mm(x, w), 0, 1, 2**62), [x.shape[0] - 1, 3, 4]), [1, 0, 2]
    ).sin(),
    "one slice": lambda x, w: aten.slice(aten.mm(x, w), 1, 4, 8).sin(),
    "one view": lambda x, w: aten.view(aten.mm(x, w), [x.shape[0], 3, 4]).sin(),
    "no reshape": lambda x, w: aten.permute(aten.slice(aten.mm(x, w), 1, 4, 8), [1, 0]).sin(),
    # not a product
    "sum": lambda x, w: aten.permute(
        aten.view(aten.slice(x + 1, 1, 0, 4), [x.shape[0], 2, 2]), [1, 0, 2]
    ).sin(),
    "input": lambda x, w: aten.permute(aten.view(x, [x.shape[0], 2, 4]), [1, 0, 2]).sin(),
    # copies that are something else than the product
    "clone of an input": lambda x, w: aten.clone(x).sin(),
    "clone with other strides": lambda x, w: aten.clone(
        aten.mm(x, w).t(), memory_format=torch.contiguous_format
    ).sin(),
}

ONE_STEP = pytest.mark.skipped_when(CollapseViews, "the chain is one step that Inductor takes")
LINES = {
    "another size": pytest.mark.skipped_when(CollapseViews, "the chain's shape or stride"),
    "one slice": ONE_STEP,
    "one view": ONE_STEP,
    "no reshape": ONE_STEP,
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=LINES.get(c, ())) for c in SKIPPED])
def test_skipped(aten_graph, contract, x_w, case):
    one = CollapseViews()
    contract(one, aten_graph(SKIPPED[case], *x_w), *x_w, matches=0)
    assert bool(one.skipped) == (case == "another size")
    if one.skipped:
        assert "row count" in one.skipped[0]


def test_attention_is_a_producer(aten_graph, contract, make_batch):
    b = make_batch([2, 1], [4, 3])

    def function(q, kv_cache):
        out = torch.ops.attn_ops.attention(q, kv_cache, b.meta, 1.0)
        return aten.view(aten.unsqueeze(out, 0), [1, q.shape[0], 32]).sin()

    gm = torch.fx.experimental.proxy_tensor.make_fx(function)(b.q, b.kv_cache)
    _, after = contract(CollapseViews(), gm, b.q, b.kv_cache, matches=1)
    assert "unsqueeze" not in after


def product_and_clone(x, w):
    y = x @ w
    return y, y.clone()


def product_and_view_clone(x, w):
    y = x @ w
    return y, y.view(-1, 3, 4).clone()


@pytest.mark.skipped_when(CollapseViews, "the copy leaves the graph")
def product_and_view_of_clone(x, w):
    y = aten.mm(x, w)
    return y, y.clone().expand(2, -1, -1)


@pytest.mark.parametrize(
    "function",
    [product_and_clone, product_and_view_clone, product_and_view_of_clone],
    ids=lambda f: f.__name__,
)
def test_outputs_stay_independent(x_w, function):
    """The caller asked for copies: writing to one result must not show in another."""
    from fx_passes import attn_ops

    outputs = torch.compile(function, backend=attn_ops)(*x_w)
    kept = outputs[1].clone()
    outputs[0].zero_()
    assert torch.equal(outputs[1], kept)
