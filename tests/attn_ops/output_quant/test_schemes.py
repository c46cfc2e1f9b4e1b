"""What a scheme takes, and what it refuses before anything is written."""

import pytest
import torch

from attn_ops.output_quant.quantize import quantize_output
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant

X = torch.ones(3, 4, 32)
SCALE = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scheme": "int8"}, "scheme must be known, got 'int8'; supported: fp8_static, "),
        ({"scheme": "fp8_row", "ue8m0": True}, "ue8m0 must be False with fp8_row, got True"),
        ({"scheme": "nvfp4", "multiply": True}, "multiply must be False with nvfp4"),
        ({"scheme": "fp8_static", "min_scale": 1.0}, "min_scale must be 0.0 with fp8_static"),
        ({"scheme": "nvfp4", "round_values": True}, "round_values must be False with nvfp4"),
        ({"scheme": "fp8_row", "min_scale": -1.0}, "min_scale must be finite and at least 0"),
        ({"scheme": "fp8_row", "min_scale": float("nan")}, "min_scale must be finite"),
    ],
)
def test_a_scheme_refuses_what_it_does_not_take(fields, said):
    with pytest.raises(ValueError, match=said):
        OutputQuant(**fields)


@pytest.mark.parametrize(
    ("x", "scheme", "scale", "said"),
    [
        (X, "fp8_static", None, "out_scale must be a tensor with fp8_static, got None"),
        (X, "fp8_row", SCALE, "out_scale must be None with fp8_row, got a tensor"),
        (X, "fp8_static", SCALE.double(), "out_scale must be torch.float32 with one element"),
        (X, "nvfp4", torch.ones(2), "out_scale must be torch.float32 with one element"),
        (X, "fp8_static", SCALE.to("meta"), "out_scale must be on cpu, got meta"),
        (torch.ones(3, 3, 32), "fp8_group64", None, "multiple of 64 with fp8_group64, got 96"),
        (torch.ones(3, 16, 3), "nvfp4", None, "head_size must be even with nvfp4, got 3"),
    ],
)
def test_tensors_must_fit_the_scheme(x, scheme, scale, said):
    with pytest.raises(ValueError, match=said):
        quantize_output(x, OutputQuant(scheme), scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_rows(scheme):
    given = SCALE if scheme in ("fp8_static", "nvfp4") else None
    out, scales = quantize_output(torch.ones(0, 4, 32), OutputQuant(scheme), given)
    assert out.shape[0] == 0
    assert not scales.float().any()
