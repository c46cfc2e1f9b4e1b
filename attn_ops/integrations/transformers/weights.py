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
    known = dict(model.named_buffers(remove_duplicate=False))
    known |= dict(model.named_parameters(remove_duplicate=False))
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
    for name, tensor in items:
        known[name].copy_(tensor)
