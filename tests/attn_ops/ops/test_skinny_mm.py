"""skinny_mm against the product in float64, by kernel and by library; what it refuses.

T rows, K inputs, M outputs.
"""

import contextlib
import importlib
from unittest import mock

import pytest
import torch

from attn_ops import skinny_mm
from attn_ops.ops.products.skinny_constants import (
    SkinnyConstants,
    block_of_rows,
    most_rows,
    skinny_constants,
)
from attn_ops.ops.triton.skinny import launch_skinny
from tests.kit.operators import opcheck

module = importlib.import_module("attn_ops.ops.products.skinny_mm")  # its function has its name
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
SMALL = SkinnyConstants(32, 64, 4, 2)
ROWS_FIRST = SMALL._replace(rows_first=True)
BF16 = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # of the interpreter's products


SIZES = [(1, 64, 40), (3, 128, 32), (16, 96, 70), (33, 64, 8)]
SUMS = 2e-3 if DEVICE.type == "cuda" else 1e-5
"""Tolerance of products in FP8: Hopper sums 128 of them in 14 bits."""


def arguments(rows, k, m, dtype=BF16, bias=False, by_row=True):
    """x, w, bias and scales, and the product in float64."""
    generator = torch.Generator().manual_seed(rows * k + m)
    x, w, b = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, k), (m, k), (m,))
    )
    x_scale = torch.rand(rows if by_row else 1, 1, generator=generator) + 0.1
    w_scale = torch.rand(1, m if by_row else 1, generator=generator) + 0.1
    x, w = (t.to(DEVICE, dtype) for t in (x, w))
    wanted = x.double() @ w.double().t()
    if dtype != FP8:
        b = b.to(DEVICE, dtype) if bias else None
        return (x, w.t(), b, None, None), wanted + (0 if b is None else b.double())
    x_scale, w_scale = x_scale.to(DEVICE), w_scale.to(DEVICE)
    b = b.to(DEVICE, torch.bfloat16) if bias else None
    wanted = wanted * x_scale.double() * w_scale.double()
    return (x, w.t(), b, x_scale, w_scale), wanted + (0 if b is None else b.double())


@pytest.mark.parametrize("dtype", [BF16, torch.float32, FP8])
@pytest.mark.parametrize(("rows", "k", "m"), SIZES)
def test_kernel(rows, k, m, dtype):
    """Sizes that tiles do not divide, with and without a bias."""
    out_dtype = torch.float32 if dtype == FP8 else dtype
    for bias, by_row in ((False, True), (True, True), (False, False)):
        given, wanted = arguments(rows, k, m, dtype, bias, by_row)
        out = launch_skinny(*given, out_dtype, SMALL)
        assert (out.dtype, out.shape, out.is_contiguous()) == (out_dtype, (rows, m), True)
        tolerance = {FP8: SUMS, torch.float32: 1e-5}.get(dtype, 2e-2)
        torch.testing.assert_close(out.double(), wanted, atol=tolerance * 10, rtol=tolerance)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("rows", "k", "m"), SIZES)
def test_forms_give_the_same_bits(rows, k, m, dtype):
    """Of whole numbers, whose sums have no rounding; on a GPU of random ones in bfloat16, too.

    NumPy, by which the interpreter sums, has an order that depends on the processor, and on a GPU
    sums in float32 have one that depends on the form.
    """
    for bias in (False, True):
        given, _ = arguments(rows, k, m, dtype, bias)
        whole = [None if t is None else (4 * t).round() for t in given]
        assert torch.equal(*(launch_skinny(*whole, dtype, form) for form in (SMALL, ROWS_FIRST)))
        if DEVICE.type == "cuda" and dtype == BF16:
            forms = (launch_skinny(*given, dtype, form) for form in (SMALL, ROWS_FIRST))
            assert torch.equal(*forms)


def test_fast_sums():
    """Without a GPU they are the same."""
    given, _ = arguments(3, 128, 32, FP8)
    fast = launch_skinny(*given, torch.float32, SMALL, fast_accum=True)
    exact = launch_skinny(*given, torch.float32, SMALL)
    torch.testing.assert_close(fast, exact, atol=1e-1, rtol=1e-2)


def test_a_row_does_not_depend_on_the_others():
    """Nor on how many there are; a NaN stays in its row."""
    (x, w, *_), _ = arguments(16, 128, 48)
    whole = launch_skinny(x, w, None, None, None, x.dtype, SMALL)
    for rows in (1, 2, 5, 16):
        some = launch_skinny(x[:rows], w, None, None, None, x.dtype, SMALL)
        assert torch.equal(some, whole[:rows])
    x[3] = float("nan")
    torn = launch_skinny(x, w, None, None, None, x.dtype, SMALL)
    assert torn[3].isnan().all()
    assert torch.equal(torn[4:], whole[4:])
    assert torch.equal(torn[:3], whole[:3])


def test_the_device_of_the_arguments():
    """Triton launches on the current device, which need not be x's."""
    (x, w, *_), _ = arguments(2, 64, 32)
    seen = []
    with mock.patch.object(
        torch.cuda, "device_of", lambda t: seen.append(t) or contextlib.nullcontext()
    ):
        launch_skinny(x, w, None, None, None, x.dtype, SMALL)
    assert len(seen) == 1
    assert seen[0] is x


def test_rows_of_a_larger_tensor():
    (x, w, *_), wanted = arguments(4, 128, 32)
    wide = torch.full((4, 200), float("nan"), dtype=x.dtype, device=DEVICE)
    wide[:, 8:136] = x
    out = launch_skinny(wide[:, 8:136], w, None, None, None, x.dtype, SMALL)
    torch.testing.assert_close(out.double(), wanted, atol=0.1, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("k", "m"), [(4096, 6144), (14336, 4096), (4096, 28672), (512, 1000)])
def test_rows_are_equal_however_many_there_are(k, m, dtype):
    """By the constants that are used, and as close to float64 as the library is."""
    (x, w, _, *scales), wanted = arguments(64, k, m, dtype)
    whole = None
    for rows in (64, 33, 32, 17, 16, 8, 2, 1):
        some = [scales[0][:rows], scales[1]] if dtype == FP8 else scales
        if module.is_skinny(rows, w, w.device):
            out = launch_skinny(x[:rows], w, None, *some, torch.bfloat16)
            torch.testing.assert_close(out.double(), wanted[:rows], atol=0.5, rtol=1e-2)
            assert whole is None or torch.equal(out, whole[:rows])
            whole = out if whole is None else whole
    assert whole is not None


@pytest.mark.parametrize("rows", [0, 1, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_operator(rows, dtype):
    """By the library here, and wherever rows are many."""
    (x, w, _, *scales), wanted = arguments(rows, 128, 256, dtype)
    keywords = dict(zip(("x_scale", "w_scale"), scales, strict=True))
    out = skinny_mm(x, w, **keywords, out_dtype=torch.bfloat16)
    assert (out.dtype, out.shape) == (torch.bfloat16, (rows, 256))
    torch.testing.assert_close(out.double(), wanted, atol=0.3, rtol=2e-2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, bias):
    (x, w, b, *_), _ = arguments(3, 128, 256, dtype, bias)
    opcheck(torch.ops.attn_ops.skinny_mm.default, (x, w, b))


def test_opcheck_fp8():
    """Comparing arguments in FP8, which the schema's check does, is not to be had on a CPU."""
    (x, w, b, x_scale, w_scale), _ = arguments(3, 128, 256, FP8)
    keywords = {"x_scale": x_scale, "w_scale": w_scale, "out_dtype": torch.bfloat16}
    keywords["fast_accum"] = True
    utils = ("test_faketensor",)
    torch.library.opcheck(
        torch.ops.attn_ops.skinny_mm.default, (x, w, b), keywords, test_utils=utils
    )


def test_the_kernel_takes_few_rows_only(monkeypatch):
    """Where it was measured, and of a weight that is read along its rows."""
    monkeypatch.setattr(module, "is_measured", lambda device: True)
    w = torch.empty(256, 128, dtype=torch.bfloat16, device="meta").t()
    most = most_rows(w)
    found = [module.is_skinny(rows, w, w.device) for rows in (0, 1, most, most + 1)]
    assert found == [False, True, True, False]
    assert not module.takes(w.contiguous(), w.device)
    assert not module.takes(w[:100], w.device)
    assert not module.takes(w.float(), w.device)


def test_tiles_fill_a_gpu_and_fit_into_it():
    """18,432 outputs are 144 of the largest tiles: 132 at one time, and 12 that are left."""
    assert skinny_constants(18432, fp8=False).block_m == 64
    assert all(skinny_constants(m, fp8=False).block_m == 128 for m in (12352, 16384, 28672, 128256))
    few = torch.empty(18432, 128, dtype=torch.bfloat16, device="meta").t()
    many = torch.empty(28672, 128, dtype=torch.bfloat16, device="meta").t()
    assert (most_rows(few), most_rows(many)) == (16, 64)
    for m in range(16, 40000, 16):
        for rows in (1, 16, 64, 256):
            form = skinny_constants(m, fp8=False, num_rows=rows)
            tiles = (form.block_m + block_of_rows(rows)) * form.block_k * 2  # of the weight and x
            assert tiles * form.num_stages <= 232448, (m, rows, form)


WRONG = {
    "x and w must have shapes": lambda x, w: (x, w[:-1]),
    "w must have the dtype of x": lambda x, w: (x, w.float()),
    "bias must have shape": lambda x, w: (x, w, x[0, :3]),
    "x_scale and w_scale must be tensors": lambda x, w: (x.to(FP8), w.to(FP8)),
}


@pytest.mark.parametrize("message", WRONG)
def test_refused(message):
    x, w = torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        skinny_mm(*WRONG[message](x, w))
    with pytest.raises(ValueError, match="out_dtype must be None"):
        skinny_mm(x, w, out_dtype=torch.float32)
