"""Linear layers in FP8: close to those they replace, by every scheme; which are replaced."""

import copy

import pytest
import torch
from torch import nn

import fx_passes
from attn_ops.integrations.merged import MergedWeights, merge_projections
from benchmarks.quantized_linear import QuantizedLinear, quantize_linear_layers

SCHEMES = ["fp8_row", "fp8_static", "fp8_group64", "fp8_group128"]


class Model(nn.Module):
    def __init__(self, inputs: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 64), nn.Linear(64, 24, bias=False)
        self.head = nn.Linear(24, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("scheme", SCHEMES)
def test_close_to_full_precision(scheme):
    """A number of E4M3 is off by at most 2**-4 of it; both factors are, at random."""
    model, x = Model().requires_grad_(False), torch.randn(2, 5, 256)
    wanted = model.first(x)
    assert quantize_linear_layers(model, scheme, lambda: model(x)) == 1
    assert isinstance(model.first, QuantizedLinear)
    assert type(model.second) is nn.Linear, "24 outputs are no multiple of 16"
    assert type(model.head) is nn.Linear
    got = model.first(x)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    error = (got - wanted).square().mean().sqrt() / wanted.std()
    assert 1e-4 < error < 2**-4
    assert bool(model.first.input_scale is None) == (scheme != "fp8_static")


def test_static_scales_are_those_of_the_inputs():
    """The largest |x| that was seen; rows of NaN, by which sessions try a model, do not count."""
    model, x = Model().requires_grad_(False), torch.randn(4, 256)
    x[0, 3], nan = 11.0, torch.full((1, 256), float("nan"))
    quantize_linear_layers(model, "fp8_static", lambda: (model(x), model(nan), model(x[:0])))
    torch.testing.assert_close(model.first.input_scale, torch.tensor([11.0 / 448]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 32, bias=False), nn.Linear(64, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.gate_proj(x), self.up_proj(x)], -1)

    def get_output_embeddings(self) -> None:
        return None


def test_merged_layers_share_a_product():
    """The values of rows are those of layers quantized apart."""
    apart, x = Block().requires_grad_(False), torch.randn(5, 64, dtype=torch.bfloat16)
    merged = copy.deepcopy(apart)
    merge_projections(merged)
    for model in (apart, merged):
        assert quantize_linear_layers(model, "fp8_row", lambda: None) == 2
    with fx_passes.recording(fx_passes.Recorder()) as recorder, torch.no_grad():
        compiled = torch.compile(merged, backend=fx_passes.attn_ops, fullgraph=True)
        torch.testing.assert_close(compiled(x), apart(x), rtol=0, atol=0)
    assert recorder.matches()["share_products"] == 1
    assert not [name for name, m in merged.named_modules() if isinstance(m, MergedWeights)]


def test_no_layer_fits():
    with pytest.raises(ValueError, match="sizes are multiples of 128 with fp8_group128, got none"):
        quantize_linear_layers(Model(96), "fp8_group128", lambda: None)
