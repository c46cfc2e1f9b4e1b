"""`attention_quant` and `merge_attn_states_quant`: contract, fusion, composition, errors."""

import dataclasses
import sys

import pytest
import torch

from attn_ops import (
    AttentionSpec,
    attention,
    attention_quant,
    get_backend,
    merge_attn_states,
    merge_attn_states_quant,
)
from attn_ops.ops.breaks import around_attention
from attn_ops.output_quant.quantize import quantize_output, reference_quantize
from attn_ops.output_quant.schemes import SCHEMES
from attn_ops.testing.calls import Case, make_case
from attn_ops.testing.features import FEATURES, LENGTHS
from attn_ops.testing.quantized import check_quantized, forms_of, nibble_steps, scale_steps
from tests.kit.marks import slow
from tests.kit.operators import opcheck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = torch.tensor([0.05], device=DEVICE)


def case_of(
    backend: str, batch: str = "mixed", feature: str = "plain", head_size: int = 64
) -> Case:
    asked = FEATURES[feature]
    spec = AttentionSpec(4, 2, head_size, torch.float32, **asked.spec)
    return make_case(get_backend(backend), spec, LENGTHS[batch], asked, device=DEVICE)


def arguments_of(case: Case) -> tuple:
    return case.q, case.kv_cache, case.meta, case.scale


def given(scheme: str) -> torch.Tensor | None:
    return SCALE if scheme in ("fp8_static", "nvfp4") else None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_opcheck(scheme):
    case, floor = case_of("TORCH"), {}
    if scheme not in ("fp8_static", "nvfp4"):
        floor = {"min_scale": 1e-6}  # NaN does not equal itself
    keywords = {"scheme": scheme, "out_scale": given(scheme), **floor}
    opcheck(torch.ops.attn_ops.attention_quant.default, arguments_of(case), keywords)
    states = [torch.randn(5, 4, 64, device=DEVICE), torch.randn(5, 4, device=DEVICE)] * 2
    opcheck(torch.ops.attn_ops.merge_attn_states_quant.default, tuple(states), keywords)


@pytest.mark.parametrize("feature", ["window", "soft_cap", "alibi", "sinks", "fp8_e4m3"])
@pytest.mark.parametrize("batch", ["decode", *slow("mixed")])
def test_with_every_option_of_a_layer(batch, feature):
    case = case_of("TRITON", batch, feature)
    plain = attention(*arguments_of(case), **case.options)
    for scheme in ("fp8_static", "fp8_group64"):
        check_quantized(case, plain, forms_of(scheme)[0])


@pytest.mark.parametrize(
    ("backend", "batch", "scheme", "head_size", "fused"),
    [
        ("TRITON", "decode", "fp8_static", 64, True), ("TRITON", "decode", "fp8_group64", 64, True),
        ("TRITON", "decode", "fp8_group128", 64, False), ("TRITON", "decode", "fp8_row", 64, False),
        ("TRITON", "mixed", "fp8_static", 64, False), ("TORCH", "decode", "fp8_static", 64, False),
    ],
)  # fmt: skip
def test_who_quantizes(backend, batch, scheme, head_size, fused, monkeypatch):
    """The backend's kernel: single tokens, a scheme that it declares, groups within a head."""
    after = []

    def quantize(*arguments):
        after.append(scheme)
        return quantize_output(*arguments)

    module = sys.modules["attn_ops.ops.attention_quant"]
    monkeypatch.setattr(module, "quantize_output", quantize)
    case = case_of(backend, batch, head_size=head_size)
    attention_quant(*arguments_of(case), scheme=scheme, out_scale=given(scheme))
    assert bool(after) != fused


@pytest.mark.parametrize("backend", ["TORCH", "TRITON"])
def test_a_shared_prefix_is_merged_and_quantized(backend):
    spec = AttentionSpec(4, 2, 64, torch.float32)
    lengths = ([1, 1, 9, 4], [33, 65, 41, 72])
    case = make_case(
        get_backend(backend), spec, lengths, FEATURES["plain"], device=DEVICE, shared_prefix=2
    )
    assert case.meta.views.cascade is not None
    plain = attention(*arguments_of(case))
    for scheme in SCHEMES:
        check_quantized(case, plain, forms_of(scheme)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_merged_states(scheme, dtype):
    states = []
    for _ in range(2):
        states += [torch.randn(7, 4, 64, device=DEVICE).to(dtype), torch.randn(7, 4, device=DEVICE)]
    states[1][3] = states[3][3] = states[1][5] = float("-inf")
    states[0][3] = float("nan")  # of a part that saw no key
    for how in forms_of(scheme):
        fields = dataclasses.asdict(how) | {"out_scale": given(scheme)}
        got = merge_attn_states_quant(*states, **fields)
        wanted = reference_quantize(merge_attn_states(*states)[0], how, given(scheme))
        steps = nibble_steps if scheme == "nvfp4" else scale_steps
        assert steps(got[0], wanted[0]) <= 1
        assert scale_steps(got[1], wanted[1]) <= 1


def test_a_hook_takes_the_call_over():
    """Captures in pieces cut around it, with memory for both results."""
    case, seen = case_of("TORCH", "decode"), []

    def hook(call):
        results = call.empty_results()
        call.run_into(results)
        seen.append([(r.dtype, tuple(r.shape)) for r in results])
        return results

    wanted = attention_quant(*arguments_of(case), scheme="fp8_group64", min_scale=1e-6)
    with around_attention(hook):
        got = attention_quant(*arguments_of(case), scheme="fp8_group64", min_scale=1e-6)
    assert seen == [[(torch.float8_e4m3fn, (6, 4, 64)), (torch.float32, (6, 4))]]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))


def test_bad_arguments_write_nothing():
    case = case_of("TORCH", "decode")
    with pytest.raises(ValueError, match="out_scale must be a tensor with fp8_static"):
        attention_quant(*arguments_of(case), scheme="fp8_static")
    with pytest.raises(ValueError, match="scheme must be known, got 'fp9'"):
        attention_quant(*arguments_of(case), scheme="fp9")
    with pytest.raises(ValueError, match="q must have shape"):
        attention_quant(case.q[0], *arguments_of(case)[1:], scheme="fp8_row")
