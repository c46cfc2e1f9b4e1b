"""How attention's output is quantized: the schemes, and the numbers that libraries differ in.

T tokens, N query heads, H head size, W = N * H values of a row, G groups of a row.
"""

import dataclasses
import functools
from typing import Any

import torch

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
"""448: the largest number of E4M3."""

FP4_MAX = 6.0
"""The largest number of E2M1."""

FP4_BLOCK = 16
"""Values that share a scale in NVFP4."""

SCHEMES: dict[str, int | None] = {
    "fp8_static": None,
    "fp8_group64": 64,
    "fp8_group128": 128,
    "fp8_row": None,
    "fp8_tensor": None,
    "nvfp4": FP4_BLOCK,
}
"""Names of the schemes, with the values of a row that share a scale; None: it is not by groups."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputQuant:
    """A scheme, and what libraries do differently in it.

    Attention's output x, rounded to q's dtype, becomes x / scale, limited to +-448 and rounded to
    E4M3. The scale is given (`fp8_static`) or amax / 448, amax being the largest |x| of those that
    share it. A row of zeros without `min_amax` and `min_scale` has scale 0 and becomes NaN, as it
    does in libraries that divide by it.

    Raises:
        ValueError: the scheme is unknown, or does not take what is asked for.
    """

    scheme: str  # of SCHEMES
    min_amax: float = 0.0  # amax is at least that; not with fp8_static, nvfp4
    min_scale: float = 0.0  # the scale is at least that; not with fp8_static, nvfp4
    round_scale: bool = False  # the scale is rounded to q's dtype; not with fp8_static, nvfp4
    round_values: bool = False  # x / scale is rounded to q's dtype before it becomes FP8
    inverse_max: bool = False  # amax * (1 / 448) instead of amax / 448; not with fp8_static, nvfp4
    inverse_scale: bool = False  # x * (1 / scale) instead of x / scale; not with fp8_static, nvfp4
    multiply: bool = False  # fp8_static: x * scale instead of x / scale
    ue8m0: bool = False  # groups: the scale is rounded up to a power of two
    column_major: bool = False  # groups: scales of one group lie next to each other, [T, G] with
    # strides (1, T)

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(
                f"scheme must be known, got {self.scheme!r}; supported: {', '.join(SCHEMES)}"
            )
        for name, taken in (
            ("min_amax", self.dynamic),
            ("min_scale", self.dynamic),
            ("round_scale", self.dynamic),
            ("round_values", self.scheme != "nvfp4"),
            ("inverse_max", self.dynamic),
            ("inverse_scale", self.dynamic),
            ("multiply", self.scheme == "fp8_static"),
            ("ue8m0", self.grouped),
            ("column_major", self.grouped),
        ):
            value = getattr(self, name)
            if value and not taken:
                raise ValueError(f"{name} must be {type(value)()} with {self.scheme}, got {value}")
            if not isinstance(value, bool) and not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")

    @property
    def group(self) -> int | None:
        """Values that share a scale, where they are a part of a row."""
        return SCHEMES[self.scheme]

    @property
    def dynamic(self) -> bool:
        """Whether FP8 scales come from the values."""
        return self.scheme not in ("fp8_static", "nvfp4")

    @property
    def grouped(self) -> bool:
        """Whether parts of a row have FP8 scales of their own."""
        return self.dynamic and self.group is not None

    def within_heads(self, head_size: int) -> bool:
        """Whether a scale is given, or that of values of one head: known where a head is."""
        return self.scheme == "fp8_static" or (
            self.group is not None and head_size % self.group == 0
        )

    def check(self, x: torch.Tensor, out_scale: torch.Tensor | None) -> None:
        """Raise a ValueError unless x [T, N, H] can be quantized so with `out_scale`."""
        if out_scale is None and self.scheme == "fp8_static":
            raise ValueError("out_scale must be a tensor with fp8_static, got None")
        if out_scale is not None:
            if self.dynamic:
                raise ValueError(f"out_scale must be None with {self.scheme}, got a tensor")
            if out_scale.dtype != torch.float32 or out_scale.numel() != 1:
                raise ValueError(
                    "out_scale must be torch.float32 with one element, "
                    f"got {out_scale.dtype} {list(out_scale.shape)}"
                )
            if out_scale.device != x.device:
                raise ValueError(f"out_scale must be on {x.device}, got {out_scale.device}")
        width = x.shape[1] * x.shape[2]
        if self.group is not None and width % self.group:
            raise ValueError(
                f"num_heads * head_size must be a multiple of {self.group} with {self.scheme}, "
                f"got {width}"
            )
        if self.scheme == "nvfp4" and x.shape[2] % 2:
            raise ValueError(f"head_size must be even with nvfp4, got {x.shape[2]}")

    def empty(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the results of x [T, N, H]: out and scales, see `attention_quant`."""
        num_tokens, num_heads, head_size = x.shape
        width = num_heads * head_size
        if self.scheme == "nvfp4":
            rows, columns = _up(num_tokens, 128), _up(width // FP4_BLOCK, 4)
            out = x.new_empty(num_tokens, num_heads, head_size // 2, dtype=torch.uint8)
            return out, x.new_zeros(rows, columns, dtype=torch.float8_e4m3fn)
        # Not like x, whose strides may be others.
        out = x.new_empty(num_tokens, num_heads, head_size, dtype=torch.float8_e4m3fn)
        if self.scheme == "fp8_static":
            return out, x.new_empty(0, dtype=torch.float32)
        if self.scheme == "fp8_tensor":
            return out, x.new_empty(1, dtype=torch.float32)
        groups = 1 if self.group is None else width // self.group
        if self.column_major:
            return out, x.new_empty(groups, num_tokens, dtype=torch.float32).t()
        return out, x.new_empty(num_tokens, groups, dtype=torch.float32)


def _up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantizedOutput:
    """What a backend that quantizes its output is given: `AttentionOptions.quant`."""

    how: OutputQuant
    out_scale: torch.Tensor | None  # one float32, or None: given by the layer
    out: torch.Tensor  # written and returned: see `OutputQuant.empty`
    scales: torch.Tensor  # written, where the scheme has scales


HOW_SCHEMA = (
    "str scheme, Tensor? out_scale=None, float min_amax=0.0, float min_scale=0.0, "
    "bool round_scale=False, bool round_values=False, bool inverse_max=False, "
    "bool inverse_scale=False, bool multiply=False, bool ue8m0=False, bool column_major=False"
)
"""Arguments of an operator's schema that say how its output is quantized."""

HOW_FIELDS = tuple(field.name for field in dataclasses.fields(OutputQuant))


# Cached: made and checked once a layer, not once a call.
@functools.lru_cache(maxsize=128)
def known_output_quant(**fields: Any) -> OutputQuant:
    """`OutputQuant(**fields)`.

    Raises:
        ValueError: as `OutputQuant`.
    """
    return OutputQuant(**fields)
