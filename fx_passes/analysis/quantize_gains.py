"""What attention that writes FP8 takes, beside attention and Inductor's own quantization."""

from typing import NamedTuple


class Gain(NamedTuple):
    """Microseconds of a layer: attention by the default backend, and its output in FP8."""

    batch: str  # requests x context, or the tokens of one prompt
    apart: float  # quantized by Inductor's kernel
    fused: float  # as `attention_quant` has it


MEASURED_ON = "NVIDIA H200"
GAINS: dict[str, tuple[Gain, ...]] = {
    "fp8_static": (
        Gain("1x1024", 8.38, 6.37), Gain("64x1024", 67.01, 65.80), Gain("2048", 81.18, 79.44),
    ),
    "fp8_group128": (
        Gain("1x1024", 9.97, 6.35), Gain("64x1024", 68.69, 66.35), Gain("2048", 82.14, 79.54),
    ),
    "fp8_group64": (
        Gain("1x1024", 9.20, 6.56), Gain("64x1024", 69.50, 66.63), Gain("2048", 91.91, 79.52),
    ),
    "fp8_row": (
        Gain("1x1024", 9.29, 8.13), Gain("64x1024", 67.04, 67.32), Gain("2048", 86.11, 79.98),
    ),
}  # fmt: skip
"""32 query and 8 KV heads of 128 (docs/performance.md#quantized-output). At 64 requests a scale a
row gains nothing and loses 0.4 percent: the choice is between equals."""


def in_words(scheme: str) -> str:
    """`fp8_row (NVIDIA H200: 8.4 for 9.0 us at 1x1024, ...)`; the name alone if not measured."""
    shown = [f"{g.fused:.1f} for {g.apart:.1f} us at {g.batch}" for g in GAINS.get(scheme, ())]
    return f"{scheme} ({MEASURED_ON}: {', '.join(shown)})" if shown else scheme
