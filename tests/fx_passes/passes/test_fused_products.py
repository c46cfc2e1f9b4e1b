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


def mlp(x, g, w, d, act=functional.silu, norm=norm):
    h = x.sin() + x
    both = functional.linear(norm(h, g), w)
    return h + functional.linear(act(both[..., :48]) * both[..., 48:], d)


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

    after = run(FusedMlp, contract, aten_graph, batched, X, G, W, D)
    assert "attn_ops.gated_mlp" in after


def test_mlp_in_bfloat16(aten_graph, contract):
    args = [t.to(torch.bfloat16) for t in (X, G, W, D)]
    assert "attn_ops.gated_mlp" in run(FusedMlp, contract, aten_graph, mlp, *args)


def another_activation(*args):
    return mlp(*args, act=functional.gelu)


def norm_of_another(x, g, w, d):
    both = norm(x, g) @ w.t()
    return (x.sin() + x) + functional.linear(functional.silu(both[:, :48]) * both[:, 48:], d)


def halves_swapped(x, g, w, d):
    h = x.sin() + x
    both = functional.linear(norm(h, g), w)
    return h + functional.linear(functional.silu(both[..., 48:]) * both[..., :48], d)


def gate_twice(x, g, w, d):
    h = x.sin() + x
    both = functional.linear(norm(h, g), w)
    return h + functional.linear(functional.silu(both[..., :48]) * both[..., :48], d)


def gate_in_narrow(x, g, w, d):
    return mlp(x, g, w, d, act=lambda gate: functional.silu(gate.half()).float())


def activation_in_narrow(x, g, w, d):
    act = lambda gate: functional.silu(gate).to(torch.bfloat16).float()  # noqa: E731
    return mlp(x, g, w, d, act=act)


def up_in_narrow(x, g, w, d):
    h = x.sin() + x
    both = functional.linear(norm(h, g), w)
    up = both[..., 48:].to(torch.int8)
    return h + functional.linear(functional.silu(both[..., :48]) * up, d)


@pytest.mark.parametrize(
    "function",
    [
        another_activation, norm_of_another, halves_swapped, gate_twice, gate_in_narrow,
        activation_in_narrow, up_in_narrow,
    ],
)  # fmt: skip
def test_other_mlps_are_left(aten_graph, contract, function):
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


@pytest.mark.skipped_when(NormProducts, 'the mode is not "always": called steps would lose by it')
def test_norm_products_are_off(aten_graph, contract):
    function = lambda x, g, w: norm(x, g) @ w.t()  # noqa: E731
    run(NormProducts, contract, aten_graph, function, X, G, W, matches=0, mode="auto")


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


@pytest.mark.skipped_when(FusedMlp, 'the mode is not "always": called steps')
def test_mlps_are_off(aten_graph, contract):
    run(FusedMlp, contract, aten_graph, mlp, X, G, W, D, matches=0, mode="auto")


@pytest.mark.skipped_when(FusedMlp, "no kernel for few rows takes a weight on a GPU")
def test_mlps_without_a_kernel(aten_graph, contract, monkeypatch):
    monkeypatch.setattr("fx_passes.passes.fused_mlp.fuses", lambda *weights, **_: len(weights) != 2)
    run(FusedMlp, contract, aten_graph, mlp, X, G, W, D, matches=0)


@pytest.mark.skipped_when(NormProducts, "no kernel for few rows takes a weight on a GPU")
def test_norm_products_without_a_kernel(aten_graph, contract, monkeypatch):
    monkeypatch.setattr("fx_passes.passes.norm_products.fuses", lambda *weights, **_: not weights)
    function = lambda x, g, w: norm(x, g) @ w.t()  # noqa: E731
    run(NormProducts, contract, aten_graph, function, X, G, W, matches=0)


@pytest.mark.slow
def test_a_session_of_a_merged_llama(make_model):
    """Both passes rewrite the layer that is compiled once; tokens are those of separate kernels."""
    from attn_ops.integrations.merged import merge_projections
    from graphs import DecodeSession

    results = []
    for mode in ("never", "always"):
        torch._dynamo.reset()
        model = make_model("llama")
        merge_projections(model)
        options = {"fused_mlp": mode, "norm_products": mode}
        compiled = torch.compile(model, backend="attn_ops", fullgraph=True, options=options)
        session = DecodeSession(compiled, max_batch_size=4, max_tokens=64)
        results.append([g.token_ids for g in session.generate([[1, 2, 3], [4, 5], [6]], 12)])
        matches = session.compile_record.matches()
        expected = {"never": None, "always": 1}[mode]
        assert (matches.get("fused_mlp"), matches.get("norm_products")) == (expected, expected)
    assert results[0] == results[1]


ALWAYS = {"fused_mlp": "always", "norm_products": "always", "skinny_products": "always"}


def _sum_with_a_size(x):
    return x + x.shape[0]


def _product_with_a_size(x):
    return torch.nn.functional.linear(x * x.shape[0], torch.ones(4, x.shape[1]))


def _sum_with_an_argument(x):
    return x * 2 + x.shape[0] * 3


@pytest.mark.parametrize(
    "function", [_sum_with_a_size, _product_with_a_size, _sum_with_an_argument]
)
@pytest.mark.parametrize("options", [None, ALWAYS])
def test_sums_and_products_with_sizes_compile(function, options):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="attn_ops", dynamic=True, options=options)
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.ones(rows, 8)
            torch.testing.assert_close(compiled(x), function(x))


def test_a_bias_of_one_element_is_left_alone():
    w, bias = torch.randn(16, 8), torch.randn(1)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.addmm(bias, x, w.t()), backend="attn_ops", options=ALWAYS
    )
    with torch.no_grad():
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), torch.addmm(bias, x, w.t()))


def test_a_single_vector_compiles():
    g, w = torch.randn(64), torch.randn(96, 64)

    def function(x):
        normed = g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return torch.nn.functional.linear(normed, w)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="attn_ops", dynamic=True, options=ALWAYS)
    with torch.no_grad():
        x = torch.randn(64)
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
        ({"eps": float("nan")}, "eps must be finite and at least 0, got nan"),
        (
            {"norm_weight": torch.ones(8, device="meta")},
            "norm_weight must have shape .* on cpu, got .* on meta",
        ),
        (
            {"x": torch.ones(2, 8).int(), "w": torch.ones(8, 4).int()},
            "x must have shape .* and a floating-point dtype",
        ),
    ],
)
def test_bad_arguments_are_named(changed, message):
    arguments = {
        "x": torch.ones(2, 8), "norm_weight": torch.ones(8), "eps": 1e-6, "w": torch.ones(8, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        norm_mm(**(arguments | changed))
