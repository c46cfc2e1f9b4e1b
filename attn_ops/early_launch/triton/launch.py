"""What Triton kernels and their launchers need to be launched early.

A kernel that is launched early must call `wait_for_inputs` before it reads what another kernel of
the step writes, and before it writes. Before that it may read weights and scales alone, which no
kernel of a step writes. tests/attn_ops/early_launch holds every kernel to that.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from attn_ops.early_launch import is_in_turn, why_not_early


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before have ended; then the next one may be set up.

    Not the other way round: a kernel that starts may count on all but its direct predecessor.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_EARLY: dict[str, Any] = {"PDL": True, "launch_pdl": True}
_IN_TURN: dict[str, Any] = {"PDL": False}


def early_launch(device: torch.device) -> dict[str, Any]:
    """The keyword arguments of a launch that say so, the constant PDL among them; read only."""
    return _EARLY if _launches_early(device) and not is_in_turn() else _IN_TURN


# Cached: a property of the device, asked by each launch.
@functools.cache
def _launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and not knobs.runtime.interpret and why_not_early(device) is None
