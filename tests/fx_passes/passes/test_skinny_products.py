"""skinny_products: which products become the operator, and which are left."""

from unittest import mock

import pytest
import torch
from torch import _meta_registrations as metas
from torch.fx.experimental import _config as symbolic_shapes_config

from attn_ops.compat.one_token_until_2_16 import traced_for_any_size
from fx_passes.passes.skinny_products import SkinnyProducts

aten = torch.ops.aten
FP8 = torch.float8_e4m3fn
X, W = torch.randn(5, 128), torch.randn(256, 128)
B = torch.randn(256)


def run(contract, aten_graph, function, *args, matches, mode="always"):
    _, after = contract(SkinnyProducts(mode), aten_graph(function, *args), *args, matches=matches)
    assert after.count("attn_ops.skinny_mm") == matches
    return after


def test_contract(aten_graph, contract):
    def function(x, w, b):
        return torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w, b)

    after = run(contract, aten_graph, function, X, W, B, matches=2)
    assert "aten.mm" not in after
    assert "aten.addmm" not in after


@pytest.mark.parametrize("by_row", [True, False])
def test_products_in_fp8(aten_graph, contract, by_row):
    """As a GPU's meta is traced; its CPU form asks how many rows there are."""

    def function(x, w, x_scale, w_scale):
        scale = x_scale * x[:, :1].abs() if by_row else x_scale
        return torch._scaled_mm(x.to(FP8), w.t(), scale, w_scale, out_dtype=torch.bfloat16)

    x_scale = torch.rand(1, 1) if by_row else torch.rand(1)
    w_scale = torch.rand(1, 256) if by_row else torch.rand(1)
    as_on_cuda = mock.patch.object(metas, "device_hint", return_value="cuda")
    oblivious = symbolic_shapes_config.patch(backed_size_oblivious=True)
    with as_on_cuda, oblivious, traced_for_any_size():
        run(contract, aten_graph, function, X, W.to(FP8), x_scale, w_scale, matches=1)


@pytest.mark.skipped_when(
    SkinnyProducts, "the second factor is not an input of the graph, read along its rows"
)
def test_skipped_when_it_is_no_weight(aten_graph, contract):
    run(contract, aten_graph, lambda x, w: x @ (w + 1).t(), X, W, matches=0)


@pytest.mark.skipped_when(
    SkinnyProducts,
    "its dtype or shape, or the device, is not one that our kernel was measured with",
)
def test_skipped_on_a_cpu(aten_graph, contract):
    run(contract, aten_graph, lambda x, w: x @ w.t(), X, W, matches=0, mode="auto")


@pytest.mark.skipped_when(
    SkinnyProducts, "the number of rows is known, and more than our kernel takes"
)
def test_skipped_when_there_are_many_rows(aten_graph, contract):
    def function(x, y, w):
        return x.sum() + (y @ w.t())

    many = torch.randn(500, 128)
    run(contract, aten_graph, function, X, many, W, matches=0)
    run(contract, aten_graph, function, X, many[:4], W, matches=1)


@pytest.mark.skipped_when(SkinnyProducts, "an argument asks for more than a product and a bias")
def test_skipped_when_more_is_asked(aten_graph, contract):
    run(contract, aten_graph, lambda x, w, b: aten.addmm(b, x, w.t(), beta=2), X, W, B, matches=0)

    def rows_of_bias(x, w):
        return aten.addmm(x[:, :1] * torch.ones(256), x, w.t())

    run(contract, aten_graph, rows_of_bias, X, W, matches=0)
