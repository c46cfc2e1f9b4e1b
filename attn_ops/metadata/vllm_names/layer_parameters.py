"""Parameters of attention layers that a backend plans with, and layers that share them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class PerLayerParameters:
    """What FlashInfer's plan must know of a layer beyond its geometry."""

    window_left: int  # keys to the left of the query's own that it sees; -1: all
    logits_soft_cap: float | None  # c in c * tanh(s / c); None: none
    sm_scale: float  # factor on q.k
    has_sinks: bool = False  # the softmax has a learned extra term


def get_per_layer_parameters(
    layers: Mapping[str, Any], layer_names: Sequence[str], cls_: type | None = None
) -> dict[str, PerLayerParameters]:
    """Parameters of some layers, by name.

    Args:
        layers: attention layers by name. A layer, or its `impl` if it has one, has `scale` and may
            have `sliding_window` (keys to the left and right; or one number that counts the query's
            own, as in `AttentionSpec`; or None), `logits_soft_cap` or, as `attn_ops.Attention`,
            `soft_cap`, and `sinks`.
        layer_names: those wanted.
        cls_: type that each must be of; None: any.

    Raises:
        ValueError: a name is unknown, or its layer is of another type or lacks `scale`.
    """
    parameters = {}
    for name in layer_names:
        if name not in layers:
            known = ", ".join(layers) or "none"
            raise ValueError(f"layer_names must be names of layers, got {name!r}; known: {known}")
        impl = getattr(layers[name], "impl", layers[name])
        if cls_ is not None and not isinstance(impl, cls_):
            raise ValueError(
                f"layer {name!r} must be of type {cls_.__name__}, got {type(impl).__name__}"
            )
        if getattr(impl, "scale", None) is None:
            raise ValueError(f"layer {name!r} must have a scale, got {type(impl).__name__} without")
        window = getattr(impl, "sliding_window", None)
        parameters[name] = PerLayerParameters(
            window_left=_window_left(window),
            logits_soft_cap=_soft_cap(impl),
            sm_scale=impl.scale,
            has_sinks=getattr(impl, "sinks", None) is not None,
        )
    return parameters


def _soft_cap(impl: Any) -> float | None:
    """By vLLM's name of it, or else by that of `attn_ops.Attention`."""
    cap = getattr(impl, "logits_soft_cap", None)
    return getattr(impl, "soft_cap", None) if cap is None else cap


def _window_left(window: Any) -> int:
    if window is None:
        return -1
    return window - 1 if isinstance(window, int) else window[0]


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises:
        ValueError: there is no layer, or one differs; it is named with what it differs in.
            `group_layers_by_parameters` gives one plan per group instead.
    """
    if not per_layer_params:
        raise ValueError("per_layer_params must name at least one layer, got none")
    first_name, first = next(iter(per_layer_params.items()))
    for name, parameters in per_layer_params.items():
        for field in dataclasses.fields(parameters):
            ours, theirs = getattr(first, field.name), getattr(parameters, field.name)
            if ours != theirs:
                raise ValueError(
                    f"layers must share {field.name}, got {ours} in {first_name!r} and {theirs} "
                    f"in {name!r}; supported: one plan per group of group_layers_by_parameters"
                )
    return first


def group_layers_by_parameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> dict[PerLayerParameters, list[str]]:
    """Names of the layers that share their parameters, in order of first appearance."""
    groups: dict[PerLayerParameters, list[str]] = {}
    for name, parameters in per_layer_params.items():
        groups.setdefault(parameters, []).append(name)
    return groups
