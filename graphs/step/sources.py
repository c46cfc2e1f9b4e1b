"""Inputs of a step that the step before has drawn: taken on the device, as the host has none yet.

S requests, R rows of tokens.
"""

from collections.abc import Mapping

import torch


def take_tokens(tensors: Mapping[str, torch.Tensor], drawn_R: torch.Tensor) -> None:
    """Write drawn tokens into `input_ids`, in place, without a host wait.

    A request with a source in `sources` brings one token, which is `drawn_R` at that row.

    Args:
        tensors: the device side of `StepTensors`, uploaded.
        drawn_R: [R] int64, tokens of the step before.
    """
    take = reference_take_tokens
    if drawn_R.device.type == "cuda":
        from graphs.step.triton.sources import launch_take_tokens as take
    take(tensors, drawn_R)


def reference_take_tokens(tensors: Mapping[str, torch.Tensor], drawn_R: torch.Tensor) -> None:
    """`take_tokens` in plain PyTorch."""
    source_S, row_S = tensors["sources"].long(), tensors["query_start_loc"][:-1].long()
    taken_S = source_S >= 0
    tensors["input_ids"][0].index_copy_(0, row_S[taken_S], drawn_R[source_S[taken_S]])
