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
        Gain("1x1024", 8.35, 7.02), Gain("64x1024", 69.28, 68.09), Gain("2048", 80.63, 78.85),
    ),
    "fp8_group128": (
        Gain("1x1024", 9.94, 6.98), Gain("64x1024", 69.92, 67.99), Gain("2048", 82.04, 79.35),
    ),
    "fp8_row": (
        Gain("1x1024", 8.96, 8.44), Gain("64x1024", 69.59, 69.69), Gain("2048", 86.26, 80.22),
    ),
}  # fmt: skip
"""32 query and 8 KV heads of 128 (docs/performance.md#quantized-output). At 64 requests a scale a
row gains nothing and loses nothing: the choice is between equals."""


def in_words(scheme: str) -> str:
    """`fp8_row (NVIDIA H200: 8.4 for 9.0 us at 1x1024, ...)`; the name alone if not measured."""
    shown = [f"{g.fused:.1f} for {g.apart:.1f} us at {g.batch}" for g in GAINS.get(scheme, ())]
    return f"{scheme} ({MEASURED_ON}: {', '.join(shown)})" if shown else scheme
