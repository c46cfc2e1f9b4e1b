"""Quantized outputs against the backend's own output, quantized by the reference.

T tokens, N query heads, H head size.
"""

import dataclasses

import torch

from attn_ops.ops.attention_quant import attention_quant
from attn_ops.output_quant.quantize import reference_quantize
from attn_ops.output_quant.schemes import OutputQuant
from attn_ops.testing.calls import Case
from attn_ops.testing.differences import expect

FORMS: dict[str, tuple[dict[str, float | bool], ...]] = {
    "fp8_static": ({}, {"multiply": True}, {"round_values": True}),
    "groups": (
        {"min_scale": 2.0**-22},
        {"round_scale": True, "round_values": True, "min_scale": 2.0**-12},
        {"ue8m0": True, "min_scale": 2.0**-22},
        {"multiply": True},
    ),
    "dynamic": (
        {},
        {"round_scale": True},
        {"min_scale": 1.0 / 448 / 512, "multiply": True},
    ),
    "nvfp4": ({},),
}


def forms_of(scheme: str) -> list[OutputQuant]:
    """A scheme as libraries write it."""
    kind = scheme if scheme in FORMS else "groups" if "group" in scheme else "dynamic"
    return [OutputQuant(scheme, **form) for form in FORMS[kind]]  # pyright: ignore[reportArgumentType]


def check_quantized(case: Case, plain: torch.Tensor, how: OutputQuant) -> None:
    """Raise unless the operator quantizes `plain` [T, N, H], what the backend writes for `case`."""
    given = how.scheme in ("fp8_static", "nvfp4")
    out_scale = torch.tensor([17.0 if how.multiply else 0.02], device=case.q.device)
    fields = dataclasses.asdict(how)
    out, scales = attention_quant(
        case.q, case.kv_cache, case.meta, case.scale,
        out_scale=out_scale if given else None, **fields, **case.options,
    )  # fmt: skip
    want, want_scales = reference_quantize(plain, how, out_scale if given else None)
    for name, got, wanted in (("out", out, want), ("scales", scales, want_scales)):
        expect(
            (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride()),
            f"{name} must be {wanted.dtype} {list(wanted.shape)} with strides {wanted.stride()}, "
            f"got {got.dtype} {list(got.shape)} with strides {got.stride()}",
        )
    steps = scale_steps(scales, want_scales)
    expect(steps <= 1, f"{how.scheme}: scales must be within a step of their dtype, got {steps}")
    steps = nibble_steps(out, want) if how.scheme == "nvfp4" else scale_steps(out, want)
    expect(steps <= 1, f"{how.scheme}: values must be within a step of their dtype, got {steps}")


def scale_steps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Most numbers of their floating point type that lie between two tensors; NaN equals NaN."""
    if a.numel() == 0:
        return 0
    kind = {4: torch.int32, 1: torch.int8}[a.element_size()]
    ordered = []
    for x in (a, b):
        bits = x.contiguous().view(kind).int()
        size = bits & (0x7FFFFFFF if kind == torch.int32 else 0x7F)
        signed = torch.where(bits < 0, -size, size)
        ordered.append(torch.where(x.float().isnan(), torch.full_like(size, 0x7FFFFFFF), signed))
    return int((ordered[0].long() - ordered[1].long()).abs().max())


def nibble_steps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The same for two numbers of E2M1 a byte."""
    worst = 0
    for shift in (0, 4):
        codes = [(x.int() >> shift) & 15 for x in (a, b)]
        signed = [torch.where(code > 7, -(code & 7), code) for code in codes]
        worst = max(worst, int((signed[0] - signed[1]).abs().max()))
    return worst
