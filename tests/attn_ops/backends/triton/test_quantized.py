"""Outputs that the kernels quantize, where keys are split over programs and where they are not."""

import pytest
import torch

from attn_ops import AttentionSpec, attention, get_backend
from attn_ops.backends.triton import decode, decode_parts, prefill, prefill_parts
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant
from attn_ops.testing.calls import make_case
from attn_ops.testing.features import FEATURES
from attn_ops.testing.quantized import check_quantized, forms_of
from tests.kit.marks import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cuts bfloat16
BATCHES = {
    "decode": ([1, 1, 0, 1, 1], [1, 70, 9, 0, 200]),
    "drafts": ([3, 3], [40, 150]),
}
"""Query lengths and seq_lens: requests of one range and of several, without keys, without rows."""


def heads_of(how: OutputQuant) -> tuple[int, int, int]:
    return (2, 1, 128) if how.group == 128 else (6, 2, 64)


@pytest.mark.parametrize(
    ("batch", "sms"), [("decode", 132), *slow(("decode", 1), ("drafts", 132), ("drafts", 1))]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_splits(scheme, batch, sms, monkeypatch):
    for module in (decode, prefill):
        monkeypatch.setattr(module, "num_sms", lambda device: sms)
    combined, before = [], [decode.combine, prefill_parts.combine_rows]
    monkeypatch.setattr(decode, "combine", lambda *a, **k: (combined.append(1), before[0](*a, **k)))
    how = forms_of(scheme)[0]
    spec = AttentionSpec(*heads_of(how), DTYPE)
    case = make_case(get_backend("TRITON"), spec, BATCHES[batch], FEATURES["plain"], device=DEVICE)
    plain = attention(case.q, case.kv_cache, case.meta, case.scale)
    for how in forms_of(scheme)[: 1 if sms > 1 else None]:
        check_quantized(case, plain, how)
    assert bool(combined) == (batch == "decode" and sms > 1)


@pytest.mark.parametrize(("heads", "head_size"), [(2, 40), *slow((2, 248), (8, 8), (8, 72))])
def test_heads_that_no_group_divides(heads, head_size):
    """Heads are padded, and groups cross heads."""
    spec, lengths = AttentionSpec(heads, heads, head_size, DTYPE), ([1, 1], [70, 3])
    case = make_case(get_backend("TRITON"), spec, lengths, FEATURES["plain"], device=DEVICE)
    plain = attention(case.q, case.kv_cache, case.meta, case.scale)
    for scheme in SCHEMES:
        group = SCHEMES[scheme]
        if group is None or heads * head_size % group == 0:
            check_quantized(case, plain, forms_of(scheme)[0])


@pytest.mark.parametrize("num_splits", [2, *slow(7)])
def test_the_last_head_quantizes_the_row(num_splits, monkeypatch):
    """Whichever program comes last; the counters start from whatever memory held."""
    monkeypatch.setattr(decode, "num_splits_of", lambda *a, **k: num_splits)
    empty = torch.empty

    def dirty(*shape, **options):
        return empty(*shape, **options).fill_(99) if options.get("dtype") is torch.int32 else (
            empty(*shape, **options)
        )  # fmt: skip

    monkeypatch.setattr(torch, "empty", dirty)
    spec = AttentionSpec(8, 2, 64, torch.float16)
    case = make_case(
        get_backend("TRITON"), spec, BATCHES["decode"], FEATURES["window"], device=DEVICE
    )
    plain = attention(case.q, case.kv_cache, case.meta, case.scale, **case.options)
    for how in forms_of("fp8_row")[:2]:
        check_quantized(case, plain, how)


@pytest.mark.slow
def test_long_rows(monkeypatch):
    """More values than a program quantizes at a time."""
    monkeypatch.setattr(decode, "num_splits_of", lambda *a, **k: 2)
    assert decode_parts.ROW_TILE.value < 72 * 64
    spec = AttentionSpec(72, 2, 64, torch.float16)
    case = make_case(
        get_backend("TRITON"), spec, ([1, 1], [3, 40]), FEATURES["plain"], device=DEVICE
    )
    plain = attention(case.q, case.kv_cache, case.meta, case.scale)
    check_quantized(case, plain, OutputQuant("fp8_row", round_scale=True))
