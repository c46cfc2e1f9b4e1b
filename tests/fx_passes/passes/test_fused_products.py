"""fused_mlp and norm_products: what becomes one operator, and what is left."""

import pytest
import torch
from torch.nn import functional

from attn_ops import norm_mm
from fx_passes.passes.fused_mlp import FusedMlp
from fx_passes.passes.norm_products import NormProducts

X = torch.randn(5, 64)
G, W, D = torch.randn(64), torch.randn(96, 64) / 8, torch.randn(64, 48) / 8


def norm(x, g, eps=1e-6, rounded=True):
    """As Transformers' LlamaRMSNorm computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return g * (wide.to(x.dtype) if rounded else wide)


def norm_of_gemma(x, g, eps=1e-6, rounded=True):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide * (1.0 + g.float())
    return wide.type_as(x) if rounded else wide


def halves(both):
    return both[..., :48], both[..., 48:]


def mlp(x, g, w, d, act=functional.silu, norm=norm, halves=halves):
    h = x.sin() + x
    gate, up = halves(functional.linear(norm(h, g), w))
    return h + functional.linear(act(gate) * up, d)


def run(one, contract, aten_graph, function, *args, matches=1, mode="always"):
    """Sums have another order, and bfloat16 is rounded less often."""
    tolerance = 0.05 if args[0].dtype == torch.bfloat16 else 1e-5
    graph = aten_graph(function, *args)
    return contract(one(mode), graph, *args, matches=matches, tolerance=tolerance)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_product(aten_graph, contract, dtype):
    args = [t.to(dtype) for t in (X, G, W)]
    after = run(NormProducts, contract, aten_graph, lambda x, g, w: norm(x, g) @ w.t(), *args)
    assert "aten.rsqrt" not in after

    def batched(x, g, w):
        return functional.linear(norm(x.unsqueeze(0), g), w)

    assert "attn_ops.norm_mm" in run(NormProducts, contract, aten_graph, batched, *args)


def test_mlp(aten_graph, contract):
    after = run(FusedMlp, contract, aten_graph, mlp, X, G, W, D)
    assert after.count("attn_ops.gated_mlp") == 1
    assert "aten.mm" not in after

    def batched(x, g, w, d):
        return mlp(x.unsqueeze(0), g, w, d)

    for dtype in (torch.float32, torch.bfloat16):
        args = [t.to(dtype) for t in (X, G, W, D)]
        assert "attn_ops.gated_mlp" in run(FusedMlp, contract, aten_graph, batched, *args)


def norm_of_another(x, g, w, d):
    gate, up = halves(norm(x, g) @ w.t())
    return (x.sin() + x) + functional.linear(functional.silu(gate) * up, d)


def silu_to_bfloat16(gate):
    return functional.silu(gate).to(torch.bfloat16).float()


OTHER = {
    "activation": {"act": functional.gelu},
    "swapped": {"halves": lambda both: halves(both)[::-1]},
    "gate twice": {"halves": lambda both: (both[..., :48], both[..., :48])},
    "gate in narrow": {"act": lambda gate: functional.silu(gate.half()).float()},
    "activation in narrow": {"act": silu_to_bfloat16},
    "up in narrow": {"halves": lambda both: (both[..., :48], both[..., 48:].to(torch.int8))},
    "norm of another": None,
}


@pytest.mark.parametrize("case", OTHER)
def test_other_mlps_are_left(aten_graph, contract, case):
    other = OTHER[case]
    function = norm_of_another if other is None else lambda *args: mlp(*args, **other)
    run(FusedMlp, contract, aten_graph, function, X, G, W, D, matches=0)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, g: g * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
        lambda x, g: g * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
        lambda x, g: g * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda x, g: (1 + g) * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
        lambda x, g: g[: x.shape[1]] + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, g: g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.int8),
        lambda x, g: g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).half(),
    ],
    ids=["of columns", "another power", "of another", "a sum", "a shift", "integers", "halves"],
)
def test_other_norms_are_left(aten_graph, contract, other):
    def function(x, g, w):
        return other(x, g) @ w.t()

    run(NormProducts, contract, aten_graph, function, X, G, W, matches=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_one_more(aten_graph, contract, dtype):
    """Gemma's and Qwen3.5's."""
    args = [t.to(dtype) for t in (X, G, W, D)]

    def function(x, g, w):
        return norm_of_gemma(x, g) @ w.t()

    after = run(NormProducts, contract, aten_graph, function, *args[:3])
    assert "attn_ops.norm_mm" in after
    assert "norm_offset = 1.0" in after
    assert "aten.add" not in after
    after = run(FusedMlp, contract, aten_graph, lambda *a: mlp(*a, norm=norm_of_gemma), *args)
    assert "attn_ops.gated_mlp" in after
    assert "norm_offset = 1.0" in after
    assert "aten.rsqrt" not in after


@pytest.mark.parametrize("norm", [norm, norm_of_gemma])
def test_a_norm_that_stays_wide_is_left(aten_graph, contract, norm):
    """Rows in bfloat16, whose norm and product are in float32."""

    def function(x, g, w):
        return norm(x, g, rounded=False) @ w.t()

    args = X.to(torch.bfloat16), G, W
    run(NormProducts, contract, aten_graph, function, *args, matches=0)


def test_a_sum_that_is_rounded_is_computed_in_front(aten_graph, contract):
    args = [t.to(torch.bfloat16) for t in (X, G, W)]
    after = run(NormProducts, contract, aten_graph, lambda x, g, w: norm(x, 1 + g) @ w.t(), *args)
    assert "attn_ops.norm_mm" in after
    assert "norm_offset" not in after


@pytest.mark.skipped_when(
    NormProducts, "something else reads the normalized rows, such as another product"
)
def test_skipped_when_rows_are_read_again(aten_graph, contract):
    def twice(x, g, w):
        y = norm(x, g)
        return y @ w.t(), y.relu()

    run(NormProducts, contract, aten_graph, twice, X, G, W, matches=0)


@pytest.mark.skipped_when(
    FusedMlp, "something else reads a value between the first addition and the last"
)
def test_skipped_when_a_value_is_read(aten_graph, contract):
    def total(x, g, w, d):
        h = x.sin() + x
        both = functional.linear(norm(h, g), w)
        return h + functional.linear(functional.silu(both[:, :48]) * both[:, 48:], d), h.relu()

    def product(x, g, w, d):
        h = x.sin() + x
        both = functional.linear(norm(h, g), w)
        out = functional.linear(functional.silu(both[:, :48]) * both[:, 48:], d)
        return h + out, out.amax()

    for function in (total, product):
        run(FusedMlp, contract, aten_graph, function, X, G, W, D, matches=0)


FORMS = {
    FusedMlp: (mlp, (X, G, W, D)),
    NormProducts: (lambda x, g, w: norm(x, g) @ w.t(), (X, G, W)),
}


@pytest.mark.skipped_when(NormProducts, 'the mode is not "always": called steps would lose by it')
@pytest.mark.skipped_when(FusedMlp, 'the mode is not "always": called steps')
@pytest.mark.parametrize("one", FORMS)
def test_off(aten_graph, contract, one):
    function, args = FORMS[one]
    run(one, contract, aten_graph, function, *args, matches=0, mode="auto")


@pytest.mark.skipped_when(FusedMlp, "no kernel for few rows takes a weight on a GPU")
@pytest.mark.skipped_when(NormProducts, "no kernel for few rows takes a weight on a GPU")
@pytest.mark.parametrize("one", FORMS)
def test_without_a_kernel(aten_graph, contract, monkeypatch, one):
    function, args = FORMS[one]
    module, number = one.__module__, len(args) - 2  # of the weights that it asks about
    monkeypatch.setattr(f"{module}.fuses", lambda *weights, **_: len(weights) != number)
    run(one, contract, aten_graph, function, *args, matches=0)


ALWAYS = {"fused_mlp": "always", "norm_products": "always", "skinny_products": "always"}


ODD = {
    "a sum with a size": (lambda x: x + x.shape[0], (3, 8), (5, 8)),
    "a product with a size": (
        lambda x: functional.linear(x * x.shape[0], torch.ones(4, x.shape[1])), (3, 8), (5, 8),
    ),
    "a sum with an argument": (lambda x: x * 2 + x.shape[0] * 3, (3, 8), (5, 8)),
    "a bias of one element": (lambda x: torch.addmm(G[:1], x, W.t()), (3, 64)),
    "a single vector": (lambda x: functional.linear(norm(x, G), W), (64,)),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_forms_compile(case):
    function, *shapes = ODD[case]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="attn_ops", dynamic=True, options=ALWAYS)
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eps", [-1.0, float("nan")])
def test_a_bad_eps_is_named(eps):
    with pytest.raises(ValueError, match=f"eps must be finite and at least 0, got {eps}"):
        norm_mm(torch.ones(2, 8), G[:8], eps, torch.ones(8, 4))
