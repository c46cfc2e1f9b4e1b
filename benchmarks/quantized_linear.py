"""Linear layers in FP8, to try what attention writes for them: activations and weights.

T rows, K inputs, M outputs, G groups of a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from attn_ops.integrations.merged import MergedSlice, MergedWeights

_FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(_FP8).max
_GROUPS = {"fp8_group64": 64, "fp8_group128": 128}
_UNIT = 16  # sizes that products in FP8 take are multiples of it


def quantize_linear_layers(model: Any, scheme: str, calibrate: Callable[[], object]) -> int:
    """Replace linear layers of a model in place, all but the head; how many.

    Layers of other sizes than FP8 products take stay. Those that `merge_projections` merged stay
    merged; with a scale a tensor, a group has one. `scheme` is fp8_row, fp8_static, fp8_group64 or
    fp8_group128: of the activations. `calibrate` calls the model on typical inputs, which tell
    static scales.
    """
    unit, head = _GROUPS.get(scheme, _UNIT), model.get_output_embeddings()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, MergedSlice) and child is not head and _fits(child, unit)
    ]
    if not found:
        raise ValueError(
            f"model must have linear layers whose sizes are multiples of {unit} with {scheme}, "
            "got none"
        )
    static = scheme == "fp8_static"
    largest = _largest_inputs([layer for *_, layer in found], calibrate) if static else {}
    wholes: dict[MergedWeights, QuantizedLinear] = {}
    for parent, name, linear in found:
        amax = largest.get(linear)
        if type(linear) is MergedSlice:
            merged = linear.merged
            whole = wholes.get(merged) or QuantizedLinear(_linear_of(merged), scheme, amax)
            wholes[merged] = whole
            setattr(parent, name, QuantizedSlice(whole, linear.begin, linear.end))
        else:
            setattr(parent, name, QuantizedLinear(linear, scheme, amax))
    for parent in list(model.modules()):  # gives the merged weights' memory back
        for name, child in list(parent.named_children()):
            if isinstance(child, MergedWeights) and child in wholes:
                setattr(parent, name, wholes[child])
    return len(found)


def _linear_of(merged: MergedWeights) -> nn.Linear:
    """A layer of a merged weight's own memory."""
    rows, columns = merged.weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(merged.weight, requires_grad=False)
    if merged.bias is not None:
        linear.bias = nn.Parameter(merged.bias, requires_grad=False)
    return linear


def _fits(linear: nn.Linear, unit: int) -> bool:
    return linear.in_features % unit == 0 and linear.out_features % _UNIT == 0


def _largest_inputs(
    layers: list[nn.Linear], calibrate: Callable[[], object]
) -> dict[nn.Linear, torch.Tensor]:
    """The largest |x| that each layer saw while `calibrate` ran."""
    largest = {linear: torch.zeros((), device=linear.weight.device) for linear in layers}

    def look(linear: Any, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].detach().nan_to_num(0.0)  # a session tries rows of NaN, which must not spread
        if x.numel():
            largest[linear] = torch.maximum(largest[linear], x.abs().max().float())

    hooks = [linear.register_forward_pre_hook(look) for linear in layers]
    try:
        calibrate()
    finally:
        for hook in hooks:
            hook.remove()
    return largest


class QuantizedLinear(nn.Module):
    """x @ weight.T + bias, of x and weight in FP8; `amax` is the largest |x|, for fp8_static."""

    weight: torch.Tensor  # [M, K] FP8
    weight_scale: torch.Tensor  # [M, 1] float32 with fp8_row, [M, G] with groups, else [1]
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None  # [1] float32; None where x tells it

    def __init__(self, linear: nn.Linear, scheme: str, amax: torch.Tensor | None = None) -> None:
        super().__init__()
        self.scheme, self.group = scheme, _GROUPS.get(scheme)
        weight_MK = linear.weight.detach().float()
        if scheme == "fp8_static":
            scale = (weight_MK.abs().max() / _MAX).view(1)
            weight = _rounded(weight_MK / scale)
        else:
            weight, scale = self._quantized(weight_MK)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", linear.bias)
        input_scale = None if amax is None else (amax.clamp(min=1e-4) / _MAX).view(1)
        self.register_buffer("input_scale", input_scale)

    def _quantized(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales, of each row or each group of it."""
        x_TGE = x_TK.unflatten(1, (-1, self.group or x_TK.shape[1]))
        scale_TG1 = x_TGE.abs().amax(dim=2, keepdim=True).float().clamp(min=1e-4) / _MAX
        return _rounded(x_TGE.float() / scale_TG1).view(x_TK.shape), scale_TG1.squeeze(2)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[M, K]: the weight that x is multiplied by."""
        group = self.group or self.weight.shape[1]
        scale = self.weight_scale.view(1, 1) if self.scheme == "fp8_static" else self.weight_scale
        return _wide(self.weight, scale, group).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        if self.input_scale is None:
            values, scale = self._quantized(x_TK)
        else:
            values, scale = _rounded(x_TK.float() / self.input_scale), self.input_scale
        out = self._product(values, scale, x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], out.shape[1])

    def _product(
        self, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Groups are multiplied out: their FP8 product is not had on all devices."""
        if self.group is not None:
            x = _wide(values, scale, self.group).to(dtype)
            return functional.linear(x, _wide(self.weight, self.weight_scale, self.group).to(dtype))
        weight_scale = self.weight_scale if self.scheme == "fp8_static" else self.weight_scale.t()
        out = torch._scaled_mm(
            values, self.weight.t(), scale, weight_scale, out_dtype=torch.bfloat16
        )
        return out.to(dtype)


class QuantizedSlice(nn.Module):
    """Rows `begin` to `end` of a merged layer in FP8; compiled, its group shares one product."""

    whole: QuantizedLinear

    def __init__(self, whole: QuantizedLinear, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end
        object.__setattr__(self, "whole", whole)  # owned by the parent, as `MergedSlice.merged`

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x)[..., self.begin : self.end]


def _wide(values: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Groups of FP8 as float32."""
    return (values.float().unflatten(1, (-1, group)) * scale.unsqueeze(2)).flatten(1)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_MAX, _MAX).to(_FP8)
