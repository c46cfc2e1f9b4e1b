"""Kernels of layers with a state, called as their operators are."""

import inspect
from typing import Any

import pytest
import torch

OPERATORS = (
    "causal_conv1d_update",
    "gated_delta_rule",
    "kda",
    "ssd_state_update",
    "selective_state_update",
)


def launched(operator: Any, *args: Any) -> torch.Tensor:
    """What the kernel of an operator computes of the operator's arguments, on their device."""
    pytest.importorskip("triton")
    from attn_ops.ops.triton import states as kernels

    # What an operator takes last, `kept`, may be left out.
    has_kept = len(args) > len(inspect.signature(operator).parameters) - 1
    *given, pool, slots, starts, seq_lens, kept = args if has_kept else (*args, None)
    places = slots, starts, seq_lens, kept
    if operator.__name__ == "causal_conv1d_update":
        return kernels.launch_causal_conv1d(*given[:3], given[3] is not None, pool, places)
    if operator.__name__ == "ssd_state_update":
        return kernels.launch_ssd(*given[:8], tuple(given[8:10]), given[10], pool, places)
    if operator.__name__ == "selective_state_update":
        return kernels.launch_selective(*given, pool, places)
    return kernels.launch_delta_rule(*given, pool, places)
