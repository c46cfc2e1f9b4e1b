"""Outputs that the kernels quantize, where keys are split over programs and where they are not."""

import pytest
import torch

from attn_ops import AttentionSpec, attention, get_backend
from attn_ops.backends.triton import decode
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing.calls import make_case
from attn_ops.testing.features import FEATURES
from attn_ops.testing.quantized import check_quantized, forms_of
from tests.kit.marks import slow

TRITON = get_backend("TRITON")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cuts bfloat16
LENGTHS = ([1, 1, 0, 1, 1], [1, 70, 9, 0, 200])
"""Requests of one range and of several, without keys, without rows."""


@pytest.mark.parametrize("sms", [132, *slow(1)])
@pytest.mark.parametrize("scheme", TRITON.support.output_quant)
def test_splits(scheme, sms, monkeypatch):
    """Keys are split over programs, or not; padding rows are quantized zeros."""
    monkeypatch.setattr(decode, "num_sms", lambda device: sms)
    combined, before = [], decode.combine
    monkeypatch.setattr(decode, "combine", lambda *a, **k: (combined.append(1), before(*a, **k)))
    heads = (2, 1, 128) if scheme == "fp8_group128" else (6, 2, 64)
    spec = AttentionSpec(*heads, DTYPE)
    case = make_case(TRITON, spec, LENGTHS, FEATURES["plain"], num_padding_rows=2, device=DEVICE)
    plain = attention(case.q, case.kv_cache, case.meta, case.scale)
    for how in forms_of(scheme):
        check_quantized(case, plain, how)
    assert bool(combined) == (sms > 1)


@pytest.mark.parametrize(("heads", "head_size"), [(2, 40), *slow((2, 248), (8, 8), (8, 72))])
def test_heads_that_no_group_divides(heads, head_size):
    """Heads are padded, and groups cross heads."""
    spec, lengths = AttentionSpec(heads, heads, head_size, DTYPE), ([1, 1], [70, 3])
    case = make_case(TRITON, spec, lengths, FEATURES["plain"], device=DEVICE)
    plain = attention(case.q, case.kv_cache, case.meta, case.scale)
    for scheme in SCHEMES:
        group = SCHEMES[scheme]
        if group is None or heads * head_size % group == 0:
            check_quantized(case, plain, forms_of(scheme)[0])
