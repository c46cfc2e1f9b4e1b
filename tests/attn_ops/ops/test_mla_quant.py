"""`mla_attention_quant`: the output of `mla_attention`, quantized by the reference."""

import dataclasses
from functools import partial

import pytest
import torch

from attn_ops import LatentShape, mla_attention, mla_attention_quant
from attn_ops.ops.breaks import around_attention
from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing.quantized import forms_of
from tests.kit.latent import build_latent_batch

SHAPE = LatentShape(16, 6, 4, 64)  # groups of 64 lie within a head
RAGGED = ([3, 0, 1, 12], [7, 5, 1, 20])
opcheck = partial(
    torch.library.opcheck,
    test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
)


def batch(**changes):
    return build_latent_batch(
        *RAGGED, shape=SHAPE, num_heads=4, dtype=torch.bfloat16, num_padding_rows=2, **changes
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_quantized_is_the_output(scheme):
    b = batch()
    plain = mla_attention(*b.arguments, **b.keywords)
    out_scale = torch.tensor([0.02]) if scheme in ("fp8_static", "nvfp4") else None
    for how in forms_of(scheme):
        fields = dataclasses.asdict(how)
        got = mla_attention_quant(*b.arguments, **b.keywords, **fields, out_scale=out_scale)
        for mine, want in zip(got, reference_quantize(plain, how, out_scale), strict=True):
            assert (mine.dtype, mine.stride()) == (want.dtype, want.stride())
            assert torch.equal(mine.float().nan_to_num(), want.float().nan_to_num())


@pytest.mark.parametrize("scheme", ["fp8_row", "nvfp4", "fp8_group64"])
def test_opcheck(scheme):
    b = batch()
    keywords = {**b.keywords, "scheme": scheme}
    if scheme != "nvfp4":
        keywords["min_scale"] = 1e-6  # padding rows would be NaN, which are not equal
    opcheck(torch.ops.attn_ops.mla_attention_quant.default, b.arguments, keywords)


def test_hooks_see_the_call():
    b, seen = batch(), []

    def hook(call):
        results = call.empty_results()
        call.run_into(results)
        seen.append(call.spec.latent)
        return results

    want = mla_attention_quant(*b.arguments, **b.keywords, scheme="fp8_row", min_scale=1e-6)
    with around_attention(hook):
        got = mla_attention_quant(*b.arguments, **b.keywords, scheme="fp8_row", min_scale=1e-6)
    assert seen == [SHAPE]
    assert all(torch.equal(a.float(), c.float()) for a, c in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"scheme": "fp8_static"}, "out_scale must be a tensor with fp8_static"),
        ({"scheme": "fp8_group100"}, "fp8_group100"),
        ({"scheme": "fp8_row", "ue8m0": True}, "ue8m0 must be False with fp8_row"),
        ({"scheme": "fp8_row", "kv_cache_dtype": "int4"}, "kv_cache_dtype must be known"),
    ],
)
def test_what_does_not_fit_is_refused(keywords, message):
    b = batch()
    with pytest.raises(ValueError, match=message):
        mla_attention_quant(*b.arguments, **(b.keywords | keywords))
