"""`mla_attention_quant`: the output of `mla_attention`, quantized by the reference."""

import pytest
import torch

from attn_ops import LatentShape, mla_attention_quant
from tests.kit.latent import build_latent_batch
from tests.kit.operators import opcheck

SHAPE = LatentShape(16, 6, 4, 64)  # groups of 64 lie within a head
RAGGED = ([3, 0, 1, 12], [7, 5, 1, 20])


def batch(**changes):
    return build_latent_batch(
        *RAGGED, shape=SHAPE, num_heads=4, dtype=torch.bfloat16, num_padding_rows=2, **changes
    )


@pytest.mark.parametrize("scheme", ["fp8_row", "nvfp4", "fp8_group64"])
def test_opcheck(scheme):
    b = batch()
    keywords = {**b.keywords, "scheme": scheme}
    if scheme != "nvfp4":
        keywords["min_scale"] = 1e-6  # padding rows would be NaN, which are not equal
    opcheck(torch.ops.attn_ops.mla_attention_quant.default, b.arguments, keywords)


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
