"""narrow_products: which batched products are computed in part, which are left, and the numbers.

Numbers are small integers, so that sums are exact in any order.
"""

import functools
import re
from collections import Counter

import pytest
import torch
from fast_prefill_models import compiled

from fx_passes import attn_ops, narrow, recording
from fx_passes.narrow import NarrowProducts
from fx_passes.observe import graph_text

aten = torch.ops.aten
T, H, K = 6, 8, 4
ROWS = torch.tensor([1, 4])


def numbers(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def of_h(function):
    """`function(h, c, x, rows)` of h [T, H, K] alone, so that one T is in all shapes."""

    def call(h, rows):
        c = h.mT[:, :, :K].contiguous()  # [T, K, K]
        x = (h.permute(2, 0, 1) * 3).contiguous()  # [K, T, H]
        return function(h, c, x, rows)

    return call


def streams(h, c, x, rows):
    """As AltUp and `fast_prefill` leave it."""
    p = (aten.bmm(h, c).permute(2, 0, 1) + x).contiguous()
    return p[0] * 2, p.index_select(1, rows) * 2


def predicted(h, c, x):
    return (aten.bmm(h, c).permute(2, 0, 1) + x).contiguous()


def arguments(dtype=torch.float32, terms=K):
    return numbers(T, H, terms, dtype=dtype), ROWS


def shapes(graph, target):
    nodes = graph.find_nodes(op="call_function", target=target)
    return [[str(size) for size in node.meta["val"].shape] for node in nodes]


def test_contract(aten_graph, contract):
    args = arguments()
    found = aten_graph(of_h(streams), *args)
    before, after = contract(NarrowProducts(), found, *args, matches=1)
    assert (before.count("aten.bmm.default"), after.count("aten.bmm.default")) == (1, 1)
    assert shapes(found.graph, aten.bmm.default) == [["2", str(H), str(K)]], "logits rows only"
    (total,) = shapes(found.graph, aten.sum.dim_IntList)
    assert total[1:] == [str(H), "1"], "one stream of all rows"


def test_the_docstring_shows_what_is_printed(aten_graph):
    """The operators of both graphs; index_select is printed as it is written by hand."""
    found = aten_graph(of_h(streams), *arguments())
    document = NarrowProducts.__doc__.split("One column")[0]
    written = [Counter(re.findall(r"aten\.(\w+)", t)) for t in document.split("After::")]

    def printed():
        text = graph_text(found.graph).replace("index_select", "index")
        names = re.findall(r"torch\.ops\.(?:aten|prims)\.(\w+)", text)
        return Counter(name for name in names if name != "sym_size")

    inputs = printed() - written[0]  # c and x
    assert written[0] + inputs == printed()
    NarrowProducts().run(found.graph)
    assert written[1] + inputs == printed()


TAKEN = {
    "a row": lambda h, c, x, r: aten.bmm(h, c).permute(1, 0, 2).contiguous()[3].sin(),
    "a column": lambda h, c, x, r: aten.bmm(h, c).permute(2, 0, 1).contiguous()[2].clone(),
    "the last column": lambda h, c, x, r: aten.bmm(h, c).permute(2, 0, 1).contiguous()[-1] + 1,
    "a number and rows of it": lambda h, c, x, r: (
        (p := aten.bmm(h, c).permute(2, 0, 1).contiguous())[1] + 0,
        p[1].index_select(0, r),
        p.index_select(1, r).exp(),
    ),
    "the same twice": lambda h, c, x, r: (
        (p := aten.bmm(h, c).permute(2, 0, 1).contiguous())[1].sin(),
        p[1].cos(),
    ),
    "behind a view": lambda h, c, x, r: (
        (aten.bmm(h, c)[None].permute(3, 0, 1, 2) + x[:, None]).contiguous()[0].sin()
    ),
    "behind a view that takes away": lambda h, c, x, r: (
        (aten.bmm(h, c).unsqueeze(1) * 2).squeeze(1).permute(2, 0, 1).contiguous()[0].sin()
    ),
    "broadcast": lambda h, c, x, r: (
        (aten.bmm(h, c).permute(2, 0, 1) + x[:, :, :1] * 2 + x[0, 0]).contiguous()[0].sin()
    ),
    "an index by a vector": lambda h, c, x, r: (
        (p := aten.bmm(h, c).permute(2, 0, 1).contiguous())[0].sin(),
        p[:, r].cos(),
    ),
}


@pytest.mark.parametrize("case", TAKEN)
def test_taken(aten_graph, contract, case):
    args = arguments()
    found = aten_graph(of_h(TAKEN[case]), *args)
    whole = shapes(found.graph, aten.bmm.default)
    contract(NarrowProducts(), found, *args, matches=1)
    assert whole[0] not in shapes(found.graph, aten.bmm.default)


LEFT = {
    "read whole": lambda h, c, x, r: (p := aten.bmm(h, c), p.permute(2, 0, 1).contiguous()[0]),
    "summed": lambda h, c, x, r: (
        (p := aten.bmm(h, c).permute(2, 0, 1).contiguous())[0].sin(),
        p.sum(0),
    ),
    "rows alone": lambda h, c, x, r: aten.bmm(h, c).clone().index_select(0, r),
    "two columns": lambda h, c, x, r: (
        (p := aten.bmm(h, c).permute(2, 0, 1).contiguous())[0].sin(),
        p[1].cos(),
    ),
    "a slice": lambda h, c, x, r: aten.bmm(h, c).clone()[:, :3].sin(),
    "a mask": lambda h, c, x, r: aten.bmm(h, c).clone()[:, x[0, 0] > 0].sin(),
    "a table": lambda h, c, x, r: aten.bmm(h, c).clone()[:, r[None]].sin(),
    "an index into something else": lambda h, c, x, r: x[
        aten.bmm(h, c).clone()[:, 0, 0].long().clamp(0, 1)
    ],
    "rows are mixed": lambda h, c, x, r: (
        aten.bmm(h, c).permute(2, 0, 1).contiguous().softmax(0)[0].sin()
    ),
    "reshaped": lambda h, c, x, r: aten.bmm(h, c).view(-1, H * K)[:, 3].sin(),
    "concatenated": lambda h, c, x, r: torch.cat([aten.bmm(h, c), h])[:, 1].sin(),
}


@pytest.mark.parametrize("case", LEFT)
def test_skipped(aten_graph, contract, case):
    args = arguments()
    before, after = contract(
        NarrowProducts(), aten_graph(of_h(LEFT[case]), *args), *args, matches=0
    )
    assert before == after


REASONS = {
    "no part": (
        lambda h, c, x, r: (aten.bmm(h, c)[None] + x[:, :, :, None]).contiguous()[0].sin(),
        "a dimension is taken of that it is broadcast to",
    ),
    "strides": (
        lambda h, c, x, r: aten.bmm(h, c).select(2, 0).sin(),
        "its part would have other strides",
    ),
    "read whole": (
        lambda h, c, x, r: ((p := predicted(h, c, x))[1].sin(), p.sum(0)),
        "sum_1 reads all of it",
    ),
    "two columns": (
        lambda h, c, x, r: ((p := predicted(h, c, x))[0].sin(), p[1].cos()),
        "several parts of it are taken",
    ),
    "two vectors": (
        lambda h, c, x, r: (
            (p := predicted(h, c, x))[0].sin(),
            p[:, r].sin(),
            p[:, r + 1].sin(),
        ),
        "several parts of it are taken",
    ),
    "an output": (
        lambda h, c, x, r: ((p := predicted(h, c, x))[0].sin(), p[:, r]),
        "what is taken is read by output",
    ),
    "a view of it is an output": (
        lambda h, c, x, r: predicted(h, c, x)[0].unsqueeze(0),
        "what is taken is read by output",
    ),
    "memory is read": (
        lambda h, c, x, r: torch.as_strided(predicted(h, c, x)[1], (H,), (1,), H).sin(),
        "what is taken is read by as_strided",
    ),
    "more rows than there are": (
        lambda h, c, x, r: (
            (p := predicted(h, c, x))[1].sin(),
            p.index_select(0, r.repeat(3) % 4).cos(),
        ),
        "more rows are taken than there are",
    ),
    "far away": (
        lambda h, c, x, r: (
            functools.reduce(lambda p, _: p + 1, range(99), predicted(h, c, x))[0] + 1
        ),
        "more than 64 operators stand between it and what is taken",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_skipped_with_a_reason(aten_graph, contract, case):
    function, reason = REASONS[case]
    args, one = arguments(), NarrowProducts()
    found = aten_graph(of_h(function), *args)
    before, after = contract(one, found, *args, matches=0)
    assert before == after
    assert one.skipped == [f"bmm is computed whole: {reason}"]


def test_long_sums_are_left(aten_graph, contract):
    args = arguments(terms=32)
    before, after = contract(
        NarrowProducts(), aten_graph(of_h(TAKEN["a column"]), *args), *args, matches=0
    )
    assert before == after


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(aten_graph, contract, dtype):
    args = arguments(dtype)
    found = aten_graph(of_h(TAKEN["a column"]), *args)
    contract(NarrowProducts(), found, *args, matches=1)
    (total,) = found.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert total.meta["val"].dtype == wide


def test_integers_are_left(aten_graph, contract):
    args = arguments(torch.int64)
    found = aten_graph(of_h(TAKEN["a column"]), *args)
    contract(NarrowProducts(), found, *args, matches=0)


def test_a_part_of_a_part(aten_graph, contract):
    """Found in one run."""
    args = arguments()
    function = of_h(lambda h, c, x, r: ((p := predicted(h, c, x))[0].sin(), p[:, r][1].cos()))
    found = aten_graph(function, *args)
    contract(NarrowProducts(), found, *args, matches=2)
    assert shapes(found.graph, aten.bmm.default) == []


@pytest.fixture(scope="module")
def odd_operators():
    """Pointwise ones as third parties may have: a tensor by keyword, random numbers."""
    with torch.library._scoped_library("narrow_tests", "DEF") as library:
        pointwise = torch.Tag.pointwise
        library.define("scaled(Tensor x, *, Tensor scale) -> Tensor", tags=[pointwise])
        random = [pointwise, torch.Tag.nondeterministic_seeded]
        library.define("noise(Tensor x) -> Tensor", tags=random)
        library.impl("scaled", lambda x, *, scale: x * scale, "CompositeExplicitAutograd")
        library.impl("noise", lambda x: x + torch.rand_like(x) * 0, "CompositeExplicitAutograd")
        yield torch.ops.narrow_tests


@pytest.mark.parametrize("name", ["scaled", "noise"])
def test_operators_that_are_not_passed(aten_graph, contract, odd_operators, name):
    more = {"scaled": lambda x: {"scale": x}, "noise": lambda x: {}}[name]
    operator = getattr(odd_operators, name)
    function = of_h(
        lambda h, c, x, r: operator(predicted(h, c, x), **more(x)).contiguous()[1].sin()
    )
    args = arguments()
    one = NarrowProducts()
    before, after = contract(one, aten_graph(function, *args), *args, matches=0)
    assert before == after


def test_checkpointing_keeps_its_policy():
    """The product is left as it is, with what says whether it is saved or computed again."""
    from torch.utils.checkpoint import checkpoint

    def function(h, c):
        return checkpoint(
            lambda h, c: predicted(h, c, 0)[0].sin(), h, c, use_reentrant=False
        ).cos()  # fmt: skip

    h, c = numbers(T, H, K).requires_grad_(), numbers(T, K, K).requires_grad_()
    with recording() as recorder:
        got = torch.compile(function, backend=attn_ops, fullgraph=True)(h, c)
    skipped = [r.skipped for r in recorder.passes if r.pass_name == "narrow_products"]
    assert any("activation checkpointing has a policy for it" in str(one) for one in skipped)
    assert recorder.matches()["narrow_products"] == 0
    torch.testing.assert_close(got, function(h, c))


def test_nodes_without_values_are_left(aten_graph):
    """As a user's own pass may put in."""
    found = aten_graph(of_h(TAKEN["a column"]), *arguments())
    (permute,) = [n for n in found.graph.nodes if n.target is aten.permute.default][-1:]
    del permute.meta["val"]
    assert NarrowProducts().run(found.graph) == 0


def test_diamonds(aten_graph, contract, monkeypatch):
    """Ways to the product are not walked one by one, of which there are 2 to the 20."""
    asked, dims = [], narrow._dims
    monkeypatch.setattr(narrow, "_dims", lambda *node: asked.append(node) or dims(*node))
    function = of_h(
        lambda h, c, x, r: functools.reduce(
            lambda p, _: p * 0.5 + p.sign(), range(20), predicted(h, c, x)
        )[0].sin()
    )
    args = arguments()
    contract(NarrowProducts(), aten_graph(function, *args), *args, matches=1)
    assert len(asked) < 1000


@pytest.mark.parametrize("rows", [[], [3]])
def test_no_row_and_one_row(rows):
    function, indices = of_h(streams), torch.tensor(rows, dtype=torch.int64)
    h = numbers(T, H, K)
    with recording() as recorder:
        got = torch.compile(function, backend=attn_ops, fullgraph=True)(h, indices)
    assert recorder.matches()["narrow_products"] == 1
    for ours, wanted in zip(got, function(h, indices), strict=True):
        torch.testing.assert_close(ours, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("rows", [[0, 7], [5, 2, 2]])
def test_by_inductor(rows):
    """Other sizes without a recompilation; not narrowed, it gives the same."""
    function, indices = of_h(streams), torch.tensor(rows, dtype=torch.int64)
    h = numbers(9, H, K)
    for on in (True, False):
        torch._dynamo.reset()
        with recording() as recorder:
            run = torch.compile(
                function, backend=attn_ops, fullgraph=True, options={"narrow_products": on}
            )
            first = arguments()
            for each in first:
                torch._dynamo.mark_dynamic(each, 0)
            run(*first)
            with torch.compiler.set_stance("fail_on_recompile"):
                got = run(h, indices)
        assert recorder.matches().get("narrow_products", 0) == on
        for ours, wanted in zip(got, function(h, indices), strict=True):
            torch.testing.assert_close(ours, wanted, atol=0, rtol=0)
            assert ours.stride() == wanted.stride()


@pytest.mark.parametrize("fast_prefill", ["on", "off"])
def test_gemma_3n(make_model, fast_prefill):
    """The layer with the last keys and values predicts one stream of all rows, if fast_prefill is
    on. All others predict all streams.
    """
    model = make_model("gemma3n")
    layers = model.config.num_hidden_layers
    with recording() as recorder:
        compiled(
            model, backend=attn_ops, options={"fast_prefill": fast_prefill, "outline_layers": False}
        )
    text = "\n".join(text for _, text in recorder.final_graphs)
    products = re.findall(r'bmm\w*: "\w+\[(s\d+), ', text)  # not those of RoPE
    assert len(products) == layers
    on = fast_prefill == "on"
    assert recorder.matches()["narrow_products"] == on
    assert len(set(products)) == 1 + on, "T and, if on, R"
    kv_layers = layers - model.config.num_kv_shared_layers
    assert products.count(products[0]) == (kv_layers - 1 if on else layers)
