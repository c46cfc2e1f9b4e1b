"""quantize_output: what is left alone, and why."""

import re

import pytest
import torch

from attn_ops import attention
from fx_passes import attn_ops, recording
from fx_passes.passes.quantize_output import QuantizeOutput
from tests.fx_passes.passes.quantize_models import (
    FP8,
    MAX,
    SCALE,
    Behind,
    act_quant,
    given,
    group,
    quantized,
    row,
    tensor,
)


def amax_of(x):
    return x.abs().amax(-1, keepdim=True).float()


def no_floor(x):
    scale = amax_of(x) / MAX
    return (x / scale).to(FP8), scale


def times_rounded_inverse(x):
    scale = amax_of(x) / MAX
    return (x * scale.to(x.dtype).reciprocal()).clamp(-MAX, MAX).to(FP8), scale


def zero_replaced(x):
    scale = amax_of(x) / MAX
    return quantized(x, torch.where(scale == 0, 0.01, scale))


def to_nearest_power(x):
    spread = act_quant(x)[1].log2().round().exp2()
    return quantized(x, spread.repeat_interleave(128, dim=-1))


def halves_of_the_width(x):
    """Two values of a row that share a scale lie half a row apart."""
    apart = x.unflatten(-1, (2, -1))
    return quantized(apart, apart.abs().amax(-2, keepdim=True).float() / MAX)


READ = "something else reads the unquantized output"
DTYPE = "it is quantized to another dtype"
BETWEEN = "something is computed between attention and its quantization"
LIMITS = "values are limited to other numbers"
RULE = "the scale is computed otherwise than amax / 448"
TENSOR = "the scale is another attention's"
SHARE = "the values that share a scale are no row"
SKIPPED = {
    "returned": (READ, lambda x: (*row(x), x), (), "the graph returns the unquantized output"),
    "summed": (READ, lambda x: (*row(x), x.sum(-1)), (), "sum_1 reads the unquantized output"),
    "its amax": (READ, lambda x: (*row(x), amax_of(x) * 2), (), "reads the unquantized output"),
    "quantized twice": (READ, lambda x: (*row(x), *tensor(x)), (), "reads the unquantized output"),
    "two scales": (READ, lambda x, s: (*given(x, s), *given(x, s * 2)), (SCALE,),
                   "reads the unquantized output"),
    "e5m2": (DTYPE, lambda x: (x.to(torch.float8_e5m2),), (), "torch.float8_e5m2 is no scheme"),
    "int8": (DTYPE, lambda x, s: ((x / s).round().clamp(-128, 127).to(torch.int8),), (SCALE,),
             "torch.int8 is no scheme"),
    "gate": (BETWEEN, lambda x, g: row(x * g), (torch.ones(256),), "mul stands between attention"),
    "residual": (BETWEEN, lambda x: row(x + 1), (), "add stands between attention"),
    "columns": (BETWEEN, lambda x: row(x[..., :128]), (), "a part of its columns is quantized"),
    "rounded": (BETWEEN, lambda x: row(x.to(torch.float16)), (), "to torch.float16 before"),
    "permuted": (BETWEEN, lambda x: row(x.view(-1, 4, 64).transpose(0, 1).reshape(4, -1)), (),
                 "stands between attention"),
    "no scale": (RULE, lambda x: (x.clamp(-MAX, MAX).to(FP8),), (), "divided by a scale"),
    "240": (LIMITS, lambda x, s: ((x / s).clamp(-240, 240).to(FP8),), (SCALE,), "not limited to"),
    "below only": (LIMITS, lambda x, s: ((x / s).clamp(min=-MAX).to(FP8),), (SCALE,),
                   "not limited to"),
    "limits given": (LIMITS, lambda x, s: (torch.clamp(x / s, -s, s).to(FP8),), (SCALE,),
                     "no number of the graph"),
    "limits given, after": (
        LIMITS, lambda x, s: (torch.minimum((x / s).clamp(-MAX, MAX), s).to(FP8),), (SCALE,),
        "no number of the graph",
    ),
    "no limits": (LIMITS, lambda x, s: ((x / s).to(FP8),), (SCALE,), "not limited to"),
    "no limits, no floor": (LIMITS, no_floor, (), "not limited to"),
    "times 1 / scale, rounded": (RULE, times_rounded_inverse, (), "which is rounded to torch.bflo"),
    "times 1 / 448": (RULE, lambda x: quantized(x, amax_of(x) * (1 / MAX)), (), "on a CPU"),
    "times 1 / 440": (RULE, lambda x: quantized(x, amax_of(x) * (1 / 440)), (), "not by 1 / 448"),
    "times 0.0022": (RULE, lambda x: quantized(x, amax_of(x) * 0.00223215), (), "not by 1 / 448"),
    "times its scale": (RULE, lambda x: ((x * (amax_of(x) / MAX)).clamp(-MAX, MAX).to(FP8),), (),
                        "it is multiplied by its scale"),
    "448 / amax": (RULE, lambda x: ((x * (MAX / amax_of(x))).clamp(-MAX, MAX).to(FP8),), (),
                   "computed with reciprocal, which no form has"),
    "by 440": (RULE, lambda x: quantized(x, amax_of(x) / 440), (), "divided by 440.0, not by 448"),
    "an amax": (RULE, lambda x: quantized(x, amax_of(x)), (), "no amax / 448"),
    "signed": (RULE, lambda x: quantized(x, x.amax(-1, keepdim=True).float() / MAX), (),
               "not that of absolute values"),
    "2-norm": (RULE, lambda x: quantized(x, x.norm(dim=-1, keepdim=True).float() / MAX), (),
               "which no form has|another norm"),
    "zero replaced": (RULE, zero_replaced, (), "with where, which no form has"),
    "nearest power": (RULE, to_nearest_power, (), "computed with round"),
    "a number": (RULE, lambda x: ((x / 0.5).clamp(-MAX, MAX).to(FP8),), (), "a number of the"),
    "no dimension": (RULE, given, (SCALE[0],), "rounded otherwise by each device"),
    "float64 scale": (RULE, given, (SCALE.double(),), "(converted to|is) torch.float64"),
    "columns' scales": (TENSOR, given, (torch.rand(256),), "has several elements and is not"),
    "groups of 32": (SHARE, lambda x: group(x, 32), (), "32 values share a scale; supported: 128"),
    "no neighbours": (SHARE, halves_of_the_width, (), "are no neighbours"),
}  # fmt: skip
"""The line of the docstring, what stands behind attention, scales, and the reason."""


@pytest.mark.parametrize("name", SKIPPED)
def test_left_alone(batch, name):
    _, function, more, reason = SKIPPED[name]
    check_left_alone(Behind(batch(), function, *more), reason)


def check_left_alone(behind: Behind, reason: str) -> None:
    before, one = str(behind.graph), QuantizeOutput("always")
    assert one.run(behind.graph) == 0
    assert str(behind.graph) == before
    assert re.search(reason, one.reasons[0]), one.skipped
    assert one.skipped[0].startswith("attention")
    assert one.summary() is None


@pytest.mark.skipped_when(QuantizeOutput, "something else reads the unquantized output")
@pytest.mark.skipped_when(QuantizeOutput, "it is quantized to another dtype")
@pytest.mark.skipped_when(
    QuantizeOutput, "something is computed between attention and its quantization"
)
@pytest.mark.skipped_when(QuantizeOutput, "values are limited to other numbers")
@pytest.mark.skipped_when(QuantizeOutput, "the scale is computed otherwise than amax / 448")
@pytest.mark.skipped_when(QuantizeOutput, "the values that share a scale are no row")
def test_each_line_has_cases():
    assert {line for line, *_ in SKIPPED.values()} == {
        READ, DTYPE, BETWEEN, LIMITS, RULE, TENSOR, SHARE,
    }  # fmt: skip


@pytest.mark.skipped_when(QuantizeOutput, "the scale is another attention's")
def test_scales_of_another_attention(batch):
    made = batch()

    def function(x, q, kv_cache):
        other = torch.ops.attn_ops.attention(q * 2, kv_cache, made.meta, 0.5)
        return quantized(x, amax_of(other.reshape(x.shape)) / MAX)

    behind = Behind(made, function, with_inputs=True)
    check_left_alone(behind, "several elements and is not computed from it")


@pytest.mark.skipped_when(QuantizeOutput, "it is quantized to NVFP4")
@pytest.mark.parametrize("per_tensor", [False, True])
def test_torchao_s_nvfp4(batch, per_tensor):
    tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    made = batch()

    def quantized(q, scale):
        out = attention(q, made.kv_cache, made.meta, 0.125)
        return tensor.nvfp4_quantize(out.view(-1, 256), 16, scale if per_tensor else None)

    with recording() as recorder, torch.no_grad():
        options = {"attn_quant": "always"}
        compiled = torch.compile(quantized, backend=attn_ops, dynamic=False, options=options)
        compiled(made.q, SCALE[0])
    (one,) = (one for one in recorder.passes if one.pass_name == "quantize_output")
    assert one.matches == 0
    assert one.reasons == ["scales of 16 values are NVFP4's, whose packed bytes no form has"]


@pytest.mark.skipped_when(QuantizeOutput, "the scale is on another device")
def test_a_scale_on_the_host(batch):
    """A tensor of no dimension may divide one that is elsewhere."""

    def function(x, scale):
        return ((x.float() / scale).clamp(-MAX, MAX).to(FP8),)

    behind = Behind(batch(), function, SCALE[0])
    scale = behind.graph.find_nodes(op="placeholder")[-1]
    with scale.meta["val"].fake_mode:
        scale.meta["val"] = torch.empty((), device="cuda")
    check_left_alone(behind, "its scale is on cuda.*, and x on cpu")


@pytest.mark.skipped_when(QuantizeOutput, "attention writes float64")
def test_float64(batch):
    check_left_alone(Behind(batch(torch.float64), row), "from torch.float64 to torch.float32")
    check_left_alone(Behind(batch(torch.float64), given, SCALE), "attention writes torch.float64")


@pytest.mark.skipped_when(QuantizeOutput, "a shape is neither a number nor a multiple of the row")
@pytest.mark.parametrize("divided", [False, True])
def test_two_rows_side_by_side(batch, divided):
    def function(x, scale):
        if divided:
            return ((x / scale).clamp(-MAX, MAX).view(-1, 512).to(FP8),)
        return given(x.view(-1, 512), scale)

    check_left_alone(Behind(batch(), function, SCALE), "a shape is neither a number nor a multiple")


def test_attention_with_lse(batch):
    made = batch()

    def function(x, q, kv_cache):
        out, lse = torch.ops.attn_ops.attention_with_lse(q, kv_cache, made.meta, 0.5)
        return *row(out.reshape(1, -1, 256)), lse

    behind = Behind(made, function, with_inputs=True)
    check_left_alone(behind, "attention_with_lse has no quantized form")


def test_what_is_not_attention_is_no_matter(batch):
    """FP8 caches and other layers' inputs are behind products: nothing is said of them."""

    def function(x, w):
        return (*row((x.view(-1, 256) @ w).view(x.shape)), (w * 2).to(FP8))

    behind = Behind(batch(), function, torch.eye(256, dtype=torch.bfloat16))
    one = QuantizeOutput("always")
    assert (one.run(behind.graph), one.skipped) == (0, [])
