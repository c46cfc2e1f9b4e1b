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
"""Names of the schemes, with the size of the groups that share a scale; None: no groups."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputQuant:
    """A scheme, and the details in which libraries differ.

    Attention's output x, rounded to q's dtype, becomes x / scale, limited to +-448 and rounded to
    E4M3. The scale is given (`fp8_static`) or amax / 448, amax being the largest |x| of the values
    that share it. A row of zeros without `min_scale` has scale 0 and becomes NaN, as it does in
    libraries that divide by it.

    Raises:
        ValueError: the scheme is unknown, or does not take an option.
    """

    scheme: str  # of SCHEMES
    min_scale: float = 0.0  # the least scale; dynamic schemes
    round_scale: bool = False  # amax / 448 is rounded to q's dtype; dynamic schemes
    round_values: bool = False  # x / scale is rounded to q's dtype before it becomes FP8
    multiply: bool = False  # x * out_scale (fp8_static), x * (1 / scale) (dynamic), not x / scale
    ue8m0: bool = False  # groups: the scale is rounded up to a power of two

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(
                f"scheme must be known, got {self.scheme!r}; supported: {', '.join(SCHEMES)}"
            )
        if not 0.0 <= self.min_scale < float("inf"):
            raise ValueError(f"min_scale must be finite and at least 0, got {self.min_scale}")
        fp8 = self.scheme != "nvfp4"
        for name, taken in (
            ("min_scale", self.dynamic),
            ("round_scale", self.dynamic),
            ("round_values", fp8),
            ("multiply", fp8),
            ("ue8m0", self.dynamic and self.group is not None),
        ):
            value = getattr(self, name)
            if value and not taken:
                raise ValueError(f"{name} must be {type(value)()} with {self.scheme}, got {value}")

    @property
    def group(self) -> int | None:
        """How many values share a scale; None: not a fixed number."""
        return SCHEMES[self.scheme]

    @property
    def dynamic(self) -> bool:
        """Whether FP8 scales come from the values."""
        return self.scheme not in ("fp8_static", "nvfp4")

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
        return out, x.new_empty(num_tokens, groups, dtype=torch.float32)


def _up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantizedOutput:
    """What a backend that quantizes its output gets: `AttentionOptions.quant`."""

    how: OutputQuant
    out_scale: torch.Tensor | None  # one float32, or None: given by the layer
    out: torch.Tensor  # written and returned: see `OutputQuant.empty`
    scales: torch.Tensor  # written, where the scheme has scales


HOW_SCHEMA = (
    "str scheme, Tensor? out_scale=None, float min_scale=0.0, bool round_scale=False, "
    "bool round_values=False, bool multiply=False, bool ue8m0=False"
)
"""Arguments of an operator's schema that say how its output is quantized."""

_FIELDS = tuple(field.name for field in dataclasses.fields(OutputQuant))


# Cached: made and checked once a layer, not once a call.
@functools.lru_cache(maxsize=128)
def known_output_quant(**fields: Any) -> OutputQuant:
    """`OutputQuant(**fields)`.

    Raises:
        ValueError: as `OutputQuant`.
    """
    return OutputQuant(**fields)


def how_of(keywords: dict[str, Any]) -> tuple[OutputQuant, torch.Tensor | None]:
    """The scheme and the given scale of an operator's keywords, which lose them."""
    fields = {name: keywords.pop(name) for name in _FIELDS if name in keywords}
    return known_output_quant(**fields), keywords.pop("out_scale", None)
