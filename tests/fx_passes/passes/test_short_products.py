"""short_products: which batched products become sums, which are left, and the numbers."""

import pytest
import torch

from fx_passes import attn_ops, recording
from fx_passes.passes.short_products import ShortProducts
from tests.fx_passes.passes.fast_prefill_models import compiled

aten = torch.ops.aten
T, H = 6, 8


def numbers(*shape, dtype=torch.float32):
    """Small integers: sums are exact in any order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def product(x, c=None):
    """As AltUp writes it, for x [T, K, H]: K streams come last, and in front again."""
    c = x[:, :, : x.shape[1]].contiguous() if c is None else c  # [T, K, K]
    h = x.transpose(0, 1)
    return aten.bmm(h.permute(1, 2, 0), c).permute(2, 0, 1) + h


@pytest.mark.parametrize("terms", [1, 2, 4])
def test_contract(aten_graph, contract, terms):
    x = numbers(T, terms, H)
    before, after = contract(ShortProducts(), aten_graph(product, x), x, matches=1)
    assert (before.count("aten.bmm.default"), after.count("aten.bmm.default")) == (1, 0)
    assert after.count("aten.mul.Tensor") == terms
    assert after.count("aten.add.Tensor") == terms, "and the one that was there"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_in_float32_at_least(aten_graph, contract, dtype):
    x = numbers(T, 4, H, dtype=dtype)
    found = aten_graph(product, x)
    contract(ShortProducts(), found, x, matches=1)
    terms = found.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {node.meta["val"].dtype for node in terms} == {wide}


def test_the_strides_are_a_products(aten_graph):
    """Views behind it are still views."""
    x = numbers(T, 4, H)
    found = aten_graph(lambda x: aten.bmm(x.mT, x[:, :, :4]).view(x.shape[0], -1), x)
    ShortProducts().run(found.graph)
    (clone,) = found.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert clone.meta["val"].is_contiguous()
    found.recompile()
    torch.testing.assert_close(found(x)[0], (x.mT @ x[:, :, :4]).view(T, -1))


LEFT = {
    "five terms": (numbers(T, 4, 5), lambda a: aten.bmm(a, a.mT)),
    "integers": (numbers(T, 4, 4, dtype=torch.int64), lambda a: aten.bmm(a, a.mT)),
    "no terms": (numbers(T, 4, 0), lambda a: aten.bmm(a, a.mT)),
    "as_strided": (
        numbers(T, 4, 4),
        lambda a: aten.bmm(a, a.mT).split(2, 2)[1].as_strided((2, 4), (1, 2)),
    ),
    "rows and columns": (numbers(T, H, 4), lambda a: aten.bmm(a, a.mT)),
    "fused operand": (
        numbers(T, H, 4),
        lambda a: aten.bmm(a[:, :4].sin(), a.mT).mT + aten.bmm(a, a.mT[:, :, :4].cos()),
    ),
    "gathered": (
        numbers(T, H, 4),
        lambda a: aten.bmm(a, a.mT[:, :, :4])[torch.zeros(2 * T, dtype=torch.int64)],
    ),
    "broadcast": (
        numbers(T, H, 4),
        lambda a: aten.bmm(a, a.mT[:, :, :4]).relu().unsqueeze(-1) * a[0, 0],
    ),
    "broadcast in parts": (
        numbers(T, H, 4),
        lambda a: [x[..., None] * a[0, 0] for x in aten.bmm(a, a.mT[:, :, :4]).split(4, 1)],
    ),
}

SIZES = pytest.mark.skipped_when(ShortProducts, "the number of terms, rows or columns changes, the")
READ_OFTEN = pytest.mark.skipped_when(ShortProducts, "an operand is read more than four times")
SPREAD = pytest.mark.skipped_when(ShortProducts, "what reads the result has more elements")
LINES = {
    "integers": SIZES,
    "rows and columns": SIZES,
    "as_strided": pytest.mark.skipped_when(ShortProducts, "the graph has `as_strided`"),
    "fused operand": READ_OFTEN,
    "gathered": SPREAD,
    "broadcast": SPREAD,
    "broadcast in parts": SPREAD,
}


@pytest.mark.parametrize("why", [pytest.param(c, marks=LINES.get(c, ())) for c in LEFT])
def test_left(aten_graph, contract, why):
    x, function = LEFT[why]
    contract(ShortProducts(), aten_graph(function, x), x, matches=0)


@pytest.mark.parametrize("sizes", [(3, 7, 1, 2), (1, 7, 2, 1, 0, 5)])
def test_by_inductor(sizes):
    """A product by hand is equal to 1e-6, for any number of tokens; compiled once, as off."""
    fast = torch.compile(product, backend=attn_ops, fullgraph=True)
    matches = []
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        for tokens in sizes:
            x, c = torch.randn(tokens, 4, H), torch.randn(tokens, 4, 4)
            for one in (x, c):
                torch._dynamo.mark_dynamic(one, 0)
            with recording() as recorder, torch.no_grad():
                got = fast(x, c)
            torch.testing.assert_close(got, product(x, c), atol=1e-6, rtol=1e-6)
            matches += [p.matches for p in recorder.passes if p.pass_name == "short_products"]
    assert matches == [1], "compiled once"


@SIZES
@pytest.mark.parametrize("dim", [1, 2])
def test_rows_and_columns_that_change_are_left(dim):
    """Elementwise operators fail for a first size of 0 where a product does not (torch 2.13)."""

    def bmm(a, b):
        return aten.bmm(a, b)

    fast, matches = torch.compile(bmm, backend=attn_ops, fullgraph=True), []
    with torch.fx.experimental._config.patch(backed_size_oblivious=True), torch.no_grad():
        for size in (0, 5):
            rows, columns = (size, 2) if dim == 1 else (2, size)
            a, b = torch.randn(3, rows, 4), torch.randn(3, 4, columns)
            torch._dynamo.mark_dynamic(a if dim == 1 else b, dim)
            with recording() as recorder:
                torch.testing.assert_close(fast(a, b), bmm(a, b), atol=1e-6, rtol=1e-6)
            matches += [p.matches for p in recorder.passes if p.pass_name == "short_products"]
    assert set(matches) == {0}


def test_products_are_in_memory(aten_graph, contract):
    """As an operand, and behind the sum, where the result has more elements."""
    x, wide = numbers(T, H, 4), numbers(4, 16)

    def function(x, wide):
        c = (x[:, 0] @ wide).view(-1, 4, 4)
        return aten.bmm(x, c).view(-1, 4) @ wide

    contract(ShortProducts(), aten_graph(function, x, wide), x, wide, matches=1)


def test_a_gather_of_fewer_rows_is_no_spread(aten_graph, contract):
    """As where fast prefill begins."""
    x, rows = numbers(T, 4, H), torch.tensor([1, 3])
    found = aten_graph(lambda x, rows: product(x).index_select(1, rows), x, rows)
    contract(ShortProducts(), found, x, rows, matches=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_by_inductor(dtype):
    """Within a rounding of the largest result, of numbers that are no integers."""
    x = torch.randn(5, 4, H).to(dtype)
    want = product(x.double())
    with recording() as recorder, torch.no_grad():
        got = torch.compile(product, backend=attn_ops, fullgraph=True)(x)
    assert [p.matches for p in recorder.passes if p.pass_name == "short_products"] == [1]
    atol = torch.finfo(dtype).eps * want.abs().amax().item()
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=0)


def test_sums_keep_what_is_said_of_the_product(aten_graph):
    """A stream, for instance."""
    found = aten_graph(product, numbers(T, 4, H))
    (bmm,) = found.graph.find_nodes(op="call_function", target=aten.bmm.default)
    bmm.meta |= {"custom": {"stream": 1}, "tensor_meta": "its own"}
    ShortProducts().run(found.graph)
    for target, count in ((aten.mul.Tensor, 4), (aten.clone.default, 1)):
        made = found.graph.find_nodes(op="call_function", target=target)
        made = [n for n in made if n.meta.get("custom") == {"stream": 1}]
        assert len(made) == count
        assert not any("tensor_meta" in n.meta for n in made)


@SIZES
def test_a_number_of_terms_that_changes_is_left():
    fast = torch.compile(product, backend=attn_ops, fullgraph=True, dynamic=True)
    x, c = torch.randn(3, 4, H), torch.randn(3, 4, 4)
    with recording() as recorder, torch.no_grad():
        torch.testing.assert_close(fast(x, c), product(x, c), atol=1e-6, rtol=1e-6)
    assert [p.matches for p in recorder.passes if p.pass_name == "short_products"] == [0]


@pytest.mark.skipped_when(ShortProducts, "the graph has gradients")
def test_training_is_left():
    x, c = (one.requires_grad_() for one in (torch.randn(3, 4, H), torch.randn(3, 4, 4)))
    with recording() as recorder:
        got = torch.compile(product, backend=attn_ops)(x, c)
        got = torch.autograd.grad(got.square().sum(), (x, c))
    assert [p.matches for p in recorder.passes if p.pass_name == "short_products"] == [0]
    want = torch.autograd.grad(product(x, c).square().sum(), (x, c))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_gemma_3n(make_model):
    """The prediction of every kind of layer. Angles of RoPE, one product for all tokens, change in
    columns: they are a product as late as here with torch 2.11, and stay one.
    """
    with recording() as recorder:
        compiled(make_model("gemma3n", num_layers=6), backend=attn_ops)
    assert sum(p.matches for p in recorder.passes if p.pass_name == "short_products") >= 3
    lines = [line for _, text in recorder.final_graphs for line in text.splitlines()]
    assert all('"f32[1, ' in line for line in lines if "= torch.ops.aten.bmm" in line)
