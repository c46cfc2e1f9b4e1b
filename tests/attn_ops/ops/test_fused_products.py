"""norm_mm and gated_mlp against float64: by kernels, by the composition, and what they refuse.

T rows, K inputs, M outputs, F columns of a gate.
"""

import pytest
import torch

from attn_ops import gated_mlp, norm_mm
from attn_ops.ops.products import fused_products
from attn_ops.ops.products.skinny_constants import SkinnyConstants
from attn_ops.ops.triton.fused_products import launch_fused
from attn_ops.ops.triton.rows import launch_rms_norm, launch_silu_mul
from attn_ops.ops.triton.skinny import launch_skinny
from tests.kit.operators import opcheck

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # of the interpreter's products
SMALL = SkinnyConstants(32, 64, 4, 2)
EPS = 1e-5


def randn(*shape, dtype=HALF):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def normed(x, weight):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def gated(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def inputs(rows, k, f, dtype=HALF):
    """x, residual, norm_weight, w_gate_up, w_down; products of order 1."""
    weights = randn(2 * f, k, dtype=dtype) / k**0.5, randn(k, f, dtype=dtype) / f**0.5
    x, residual = randn(rows, k, dtype=dtype) * 3, randn(rows, k + 1, dtype=dtype)[:, :k]
    return x, residual, randn(k, dtype=dtype) + 1, *(w.t() for w in weights)


def mlp(x, residual, weight, w_gate_up, w_down):
    total = x.double() + residual.double()
    return total + gated(normed(total, weight) @ w_gate_up.double()) @ w_down.double()


def launch(*args, **kwargs):
    return launch_fused(*args, constants=SMALL, **kwargs)


def close(out, wanted, tolerance=2e-2):
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("rows", "k", "m"), [(1, 64, 40), (3, 128, 32), (16, 96, 70)])
@pytest.mark.parametrize("bias", [False, True])
def test_norm(rows, k, m, bias):
    """Sizes that tiles do not divide."""
    x, w, weight = randn(rows, k), randn(m, k) / 8, randn(k)
    b = randn(m) if bias else None
    wanted = normed(x, weight) @ w.double().t() + (0 if b is None else b.double())
    close(launch(x, w.t(), norm_weight=weight, eps=EPS, bias=b), wanted)


@pytest.mark.parametrize(("rows", "k", "f"), [(1, 64, 16), (5, 96, 40)])
def test_norm_of_a_sum_and_a_gate(rows, k, f):
    x, residual, weight, w, _ = inputs(rows, k, f)
    wanted = gated(normed(x.double() + residual.double(), weight) @ w.double())
    close(launch(x, w, addend=residual, norm_weight=weight, eps=EPS, gated=True), wanted)


def test_a_number_added_to_the_weight():
    """Gemma's norms: by the kernels and by what stands for them."""
    x, residual, weight, w, down = inputs(3, 64, 40)
    wanted = normed(x, weight.double() + 1) @ w.double()
    close(launch(x, w, norm_weight=weight, norm_offset=1.0, eps=EPS), wanted)
    close(norm_mm(x, weight, EPS, w, norm_offset=1.0), wanted)
    wanted = mlp(x, residual, weight.double() + 1, w, down)
    close(gated_mlp(x, residual, weight, EPS, w, down, norm_offset=1.0), wanted, 4e-2)
    rows = launch_rms_norm(x, None, weight, EPS, 1.0)[1]
    torch.testing.assert_close(rows.double(), normed(x, weight.double() + 1), atol=2e-2, rtol=2e-2)


def test_vectors_with_strides():
    """A norm's weight and a bias that are columns of something else."""
    x, w, weight, b = randn(2, 64), randn(40, 64) / 8, randn(64, 2)[:, 1], randn(40, 3)[:, 1]
    wanted = normed(x, weight) @ w.double().t() + b.double()
    close(launch(x, w.t(), norm_weight=weight, eps=EPS, bias=b), wanted)
    close(launch_rms_norm(x, None, weight, EPS)[1], normed(x, weight), 5e-3)
    wanted = x.double() @ w.double().t() + b.double()
    close(launch_skinny(x, w.t(), b, None, None, x.dtype, SMALL), wanted)


def test_large_rows_in_float16(monkeypatch):
    """Products with the norm's weight that are over 65,504 before they are divided by the norm."""
    monkeypatch.setattr(fused_products, "takes", lambda w, device: True)
    x, weight = randn(3, 128, dtype=torch.float16) * 8000, randn(128, dtype=torch.float16).abs() + 9
    w, w_down = randn(64, 128, dtype=torch.float16) / 200, randn(128, 32, dtype=torch.float16)
    close(norm_mm(x, weight, EPS, w.t()), normed(x, weight) @ w.double().t())
    args = x, x / 8, weight, w.t(), w_down.t()
    close(gated_mlp(*args[:3], EPS, *args[3:]), mlp(*args))


@pytest.mark.parametrize("num_residuals", [0, 1, 2])
@pytest.mark.parametrize(("rows", "rows_first"), [(3, False), (33, False), (33, True)])
def test_residuals(num_residuals, rows, rows_first):
    """Bit for bit as by the product alone and additions behind it."""
    form = SMALL._replace(rows_first=rows_first)
    x, w = randn(rows, 128), randn(40, 128) / 8
    residuals = tuple(randn(rows, 40 + i)[:, :40] for i in range(num_residuals))
    alone = launch_skinny(x, w.t(), None, None, None, x.dtype, form)
    out = launch_fused(x, w.t(), residuals=residuals, constants=form)
    assert torch.equal(out, sum(residuals, torch.zeros_like(alone)) + alone)


def test_a_row_does_not_depend_on_the_others():
    """Nor on how many there are; a NaN stays in its row."""
    x, residual, weight, w, _ = inputs(16, 128, 32)
    more = {"norm_weight": weight, "eps": EPS, "gated": True}
    whole = launch(x, w, addend=residual, **more)
    for rows in (1, 2, 5, 15):
        assert torch.equal(launch(x[:rows], w, addend=residual[:rows], **more), whole[:rows])
        assert torch.equal(launch(x[-rows:], w, addend=residual[-rows:], **more), whole[-rows:])
    x[3] = float("nan")
    torn = launch(x, w, addend=residual, **more)
    assert torn[3].isnan().all()
    assert torch.equal(torn[4:], whole[4:])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("k", [40, 130])
def test_kernels_of_rows(rows, k):
    x, residual, weight = randn(rows, k), randn(rows, k + 1)[:, :k], randn(k)
    total, out = launch_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    close(out, normed(total, weight), 5e-3)
    close(launch_rms_norm(x, None, weight, EPS)[1], normed(x, weight), 5e-3)
    close(launch_silu_mul(x), gated(x.double()), 5e-3)


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 6e-2)]
)
def test_operators(rows, dtype, tolerance):
    args = inputs(rows, 128, 64, dtype)
    close(gated_mlp(*args[:3], EPS, *args[3:]), mlp(*args), tolerance)
    x, _, weight, w, _ = args
    close(norm_mm(x, weight, EPS, w), normed(x, weight) @ w.double(), tolerance)


@pytest.mark.parametrize("enabled", [True, False])
def test_in_autocast(enabled):
    args = inputs(40, 128, 64, torch.float32)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=enabled):
        found = gated_mlp(*args[:3], EPS, *args[3:])
    close(found, mlp(*args), 6e-2 if enabled else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4096, 14336), (512, 1024)])
def test_operators_by_kernels(sizes):
    """By the constants in use; a row of few is that of more, and none is far from float64."""
    args = inputs(16, *sizes, torch.bfloat16)
    whole = gated_mlp(*args[:3], EPS, *args[3:])
    close(whole, mlp(*args), 6e-2)
    for rows in (1, 2, 8, 15):
        some = gated_mlp(args[0][:rows], args[1][:rows], args[2], EPS, *args[3:])
        assert torch.equal(some, whole[:rows])
    many = inputs(70, *sizes, torch.bfloat16)
    close(gated_mlp(*many[:3], EPS, *many[3:]), mlp(*many), 6e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x, residual, weight, w, w_down = inputs(3, 64, 32, dtype)
    opcheck(torch.ops.attn_ops.gated_mlp.default, (x, residual, weight, EPS, w, w_down))
    opcheck(torch.ops.attn_ops.norm_mm.default, (x, weight, EPS, w, w[0]))


def test_refused():
    x, residual, weight, w, w_down = inputs(2, 16, 8, torch.float32)
    with pytest.raises(ValueError, match="x and w must have shapes"):
        norm_mm(x, weight, EPS, w.half())
    with pytest.raises(ValueError, match=r"norm_weight must have shape \[16\] on .*, got \[3\]"):
        norm_mm(x, weight[:3], EPS, w)
    with pytest.raises(ValueError, match=r"bias must have shape \[16\]"):
        norm_mm(x, weight, EPS, w, weight[:3])
    with pytest.raises(ValueError, match="residual must be"):
        gated_mlp(x, residual[:1], weight, EPS, w, w_down)
    for wrong in ((w[:, :15], w_down[:7]), (w, w_down[:, :3])):
        with pytest.raises(ValueError, match="w_gate_up and w_down must be"):
            gated_mlp(x, residual, weight, EPS, *wrong)
