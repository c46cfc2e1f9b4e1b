"""The quantize kernels against the reference, and the reference against torchao."""

import importlib

import pytest
import torch

from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant, QuantizedOutput
from attn_ops.output_quant.triton.quantize import launch_quantize
from attn_ops.testing.quantized import forms_of
from tests.kit.marks import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES, MORE = ((5, 4, 64), (1, 2, 128)), ((3, 4, 96), (2, 3, 256))
FORMS = [how for scheme in SCHEMES for how in forms_of(scheme)]


def values(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes; a row of zeros, and a row with a NaN where there are enough."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.rand(shape[0], shape[1], 1) * 20
    if shape[0] > 2:
        x[1], x[2, 0, 3] = 0, float("nan")
    return x.to(dtype).to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Comparable where a NaN is: its sign says nothing."""
    return x if x.dtype == torch.uint8 else x.float().nan_to_num(777)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *slow(*((shape,) for shape in MORE))], ids=str)
@pytest.mark.parametrize("how", FORMS, ids=str)
def test_kernels_equal_the_reference(how, shape, dtype):
    if how.group and shape[1] * shape[2] % how.group:
        with pytest.raises(ValueError, match=f"multiple of {how.group}"):
            how.check(torch.empty(shape), None)
        return
    x = values(shape, dtype)
    scales = [torch.tensor([20.0 if how.multiply else 0.04], device=DEVICE)]
    scales = {"fp8_static": scales, "nvfp4": [None, *scales]}.get(how.scheme, [None])
    for out_scale in scales:
        quant = QuantizedOutput(how, out_scale, *how.empty(x))
        got, wanted = launch_quantize(x, quant), reference_quantize(x, how, out_scale)
        for a, b in zip((got, quant.scales), wanted, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("per_tensor", [None, 0.003])
def test_nvfp4_is_torchao_s(per_tensor):
    formats = "torchao.prototype.mx_formats"
    nvfp4_quantize = pytest.importorskip(f"{formats}.nvfp4_tensor").nvfp4_quantize
    to_blocked = importlib.import_module(f"{formats}.utils").to_blocked
    x = values((5, 4, 64), torch.bfloat16).nan_to_num(1.0).cpu()
    scale = None if per_tensor is None else torch.tensor([per_tensor])
    blocks, packed = nvfp4_quantize(x.reshape(5, 256), 16, scale)
    out, scales = reference_quantize(x, OutputQuant("nvfp4"), scale)
    assert torch.equal(out.reshape(5, 128), packed.view(torch.uint8))
    swizzled = to_blocked(blocks.view(5, 16)).view(torch.uint8)
    assert torch.equal(scales.view(torch.uint8).flatten(), swizzled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["fp8_row", "fp8_tensor", "fp8_group64", "fp8_group128"])
def test_fp8_is_torchao_s(scheme, dtype):
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    x = values((5, 4, 64), dtype).nan_to_num(1.0).cpu()
    rows = x.reshape(5, 256)
    block = {"fp8_row": [1, 256], "fp8_tensor": [5, 256]}.get(scheme)
    block = block or [1, OutputQuant(scheme).group]
    scale = primitives._choose_scale_float8(rows, block)
    wanted = primitives._quantize_affine_float8(rows, scale)
    out, scales = reference_quantize(x, OutputQuant(scheme, round_scale=True))
    assert torch.equal(scales.flatten(), scale.flatten())
    assert torch.equal(bits(out.reshape(5, 256)), bits(wanted))
    if scheme != "fp8_tensor":
        assert out[1].isnan().all()  # of zeros: torchao divides by a scale of 0


def test_powers_of_two_are_rounded_up():
    amax = torch.tensor([448.0, 449.0, 1.0, 0.0]).view(4, 1, 1)
    x = amax * torch.ones(4, 1, 64)
    _, scales = reference_quantize(x, OutputQuant("fp8_group64", ue8m0=True))
    assert scales.flatten().tolist() == [1.0, 2.0, 2.0**-8, 0.0]
