"""The device's work around a decode step: take the last step's tokens, keep the new ones, stop.

S requests, R rows of tokens, N steps without the host.
"""

from collections.abc import Mapping

import torch

from attn_ops import PAD_SLOT_ID
from attn_ops.integrations.transformers.rotary import SHIFT


def finish_step(
    tokens_S: torch.Tensor, tensors: Mapping[str, torch.Tensor], block_size: int
) -> None:
    """Make what a decode step drew the next step's input, in place and capturable.

    The tokens go to row `step % N` of `tokens`. A request whose token is one of its stop tokens, or
    its last by `remaining`, is active no more: it keeps its lengths, and writes no keys and values.

    Args:
        tokens_S: [S] int64.
        tensors: the device side of `StepTensors`, of one row a request.
        block_size: tokens a block holds.
    """
    finish = reference_finish_step
    if tokens_S.device.type == "cuda":
        from graphs.step.triton.finish import launch_finish_step as finish
    finish(tokens_S, tensors, block_size)


def reference_finish_step(
    tokens_S: torch.Tensor, tensors: Mapping[str, torch.Tensor], block_size: int
) -> None:
    """`finish_step` in plain PyTorch."""
    active_S, remaining_S = tensors["active"], tensors["remaining"]
    step, ring_NS = tensors["step"], tensors["tokens"]
    ring_NS.index_copy_(0, step % ring_NS.shape[0], tokens_S.unsqueeze(0))
    step.add_(1)
    remaining_S.sub_(active_S.int())
    stopped_S = (tokens_S.unsqueeze(1) == tensors["stop_tokens"]).any(1)
    active_S.logical_and_(~stopped_S & (remaining_S > 0))
    shift_S = tensors["position_ids"][0] // SHIFT * SHIFT
    torch.ops.attn_ops.advance_step(
        tokens_S,
        tensors["input_ids"][0],
        tensors["position_ids"][0],
        tensors["seq_lens"],
        tensors["slot_mapping"],
        tensors["block_table"],
        block_size,
        active=active_S,
    )
    tensors["position_ids"][0].remainder_(SHIFT).add_(shift_S)
    if "window_block_table" in tensors:
        last_S = (tensors["seq_lens"] - 1).clamp(min=0).long()
        table_SM = tensors["window_block_table"]
        block_S = table_SM.gather(1, (last_S // block_size).unsqueeze(1)).squeeze(1).long()
        slots_S = block_S * block_size + last_S % block_size
        padding_S = tensors["slot_mapping"] < 0
        tensors["window_slot_mapping"].copy_(slots_S.masked_fill(padding_S, PAD_SLOT_ID))


def take_tokens(tensors: Mapping[str, torch.Tensor], drawn_R: torch.Tensor) -> None:
    """Write drawn tokens into `input_ids`, in place, without a host wait.

    A request with a source in `sources` brings one token, which is `drawn_R` at that row.

    Args:
        tensors: the device side of `StepTensors`, uploaded.
        drawn_R: [R] int64, tokens of the step before.
    """
    take = reference_take_tokens
    if drawn_R.device.type == "cuda":
        from graphs.step.triton.finish import launch_take_tokens as take
    take(tensors, drawn_R)


def reference_take_tokens(tensors: Mapping[str, torch.Tensor], drawn_R: torch.Tensor) -> None:
    """`take_tokens` in plain PyTorch."""
    source_S, row_S = tensors["sources"].long(), tensors["query_start_loc"][:-1].long()
    taken_S = source_S >= 0
    tensors["input_ids"][0].index_copy_(0, row_S[taken_S], drawn_R[source_S[taken_S]])
