"""Writes weights of a model in place, so that captured graphs and compiled code go on."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch


@torch.no_grad()
def write_weights(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy tensors into the parameters and buffers of their names; all of them or none.

    Merged projections are written through: their parameters are views.

    Args:
        model: as Transformers made it.
        weights: names as in `model.state_dict()`, and tensors of the same shapes and dtypes, on any
            device.

    Raises:
        ValueError: a name is unknown, or a tensor does not fit; nothing is written.
    """
    items: list[Any] = list(weights.items() if isinstance(weights, Mapping) else weights)
    known = _tensors_of(model)
    for name, tensor in items:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            meant = f", which may mean {near[0]!r}" if near else ""
            raise ValueError(f"weights must be those of the model, got {name!r}{meant}")
        own = known[name]
        if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (
            own.shape,
            own.dtype,
        ):
            raise ValueError(
                f"weight {name} must be {own.dtype} {list(own.shape)}, got "
                f"{getattr(tensor, 'dtype', type(tensor).__name__)} "
                f"{list(getattr(tensor, 'shape', []))}"
            )
        if tensor.is_meta or tensor.layout != own.layout:
            raise ValueError(
                f"weight {name} must hold numbers as the model's does, {own.layout}, got "
                f"{tensor.layout} on {tensor.device}"
            )
    for name, tensor in items:
        known[name].copy_(tensor)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names: the GPU waits for them, so in one walk."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    }
