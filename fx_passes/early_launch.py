"""Whether the kernels that Inductor writes are launched early: decided once a compilation."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attn_ops.compat.early_launch_until_2_16 import kernels_wait
from attn_ops.early_launch import launched_in_turn, why_not_early
from fx_passes.config import PassConfig

OPTION = "triton.enable_pdl"
"""Of `torch._inductor.config`. It is set while our backend compiles, and is part of cache keys."""


@dataclasses.dataclass(frozen=True)
class EarlyLaunch:
    """What was decided."""

    early: bool
    in_turn: bool  # kernels of ours that the compiled function calls are launched in turn, too
    why: str | None  # in words; None: nobody asked, and there is no GPU
    patches: dict[str, Any]  # options of Inductor

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """The block in which Inductor compiles."""
        return kernels_wait() if self.early else contextlib.nullcontext()

    def called(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function as it is to be called."""
        if not self.in_turn:
            return compiled

        def call(*args: Any) -> Any:
            with launched_in_turn():
                return compiled(*args)

        return call


def early_launch_of(
    config: PassConfig, given: Mapping[str, Any], example_inputs: Sequence[Any]
) -> EarlyLaunch:
    """Decide it for a graph.

    Args:
        config: whose `early_launch` is "auto", "on" or "off".
        given: options of Inductor that the user gave; `triton.enable_pdl` among them decides.
        example_inputs: of the graph, parameters included.

    Raises:
        ValueError: "on", and the device cannot.
    """
    if config.early_launch == "off":
        return EarlyLaunch(False, True, "off: kernels are launched in turn", {OPTION: False})
    devices = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    device = next((d for d in devices if d.type == "cuda"), next(iter(devices), None))
    why_not = "a graph without tensors" if device is None else why_not_early(device)
    if config.early_launch == "on" and why_not is not None:
        raise ValueError(
            f"options['early_launch'] must be 'auto' or 'off' here, got 'on' for {why_not}"
        )
    on_gpu = device is not None and device.type == "cuda"
    if OPTION in given:
        early = bool(given[OPTION]) and why_not is None
        return EarlyLaunch(early, False, f"{OPTION} is given: {given[OPTION]}", {})
    if why_not is not None:
        return EarlyLaunch(False, False, f"no: {why_not}" if on_gpu else None, {})
    return EarlyLaunch(True, False, "kernels start while those in front still run", {OPTION: True})
