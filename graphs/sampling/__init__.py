"""Next tokens from logits, on the device, so that sampling can be part of a captured step.

    logits -> penalties -> temperature, top-k, top-p, min-p -> race -> tokens

The token of a row depends only on its logits, its parameters, its seed and its position. It does
not depend on a generator's state, on the place in the batch or on the kind of the step. Random
numbers come from a counter (`philox`). Filters and penalties only change logits; a race (`race`)
then draws. A row with neutral filters draws the same token in a FILTERED step as in a RANDOM one.
"""

from collections.abc import Mapping

import torch

from graphs.sampling.argmax import argmax
from graphs.sampling.filters import filtered
from graphs.sampling.params import FIELDS, Sampling, SamplingParams
from graphs.sampling.penalties import PenaltyState, penalized
from graphs.sampling.race import LEAST_TEMPERATURE, reference_race

__all__ = [
    "FIELDS",
    "PenaltyState",
    "SamplingParams",
    "argmax",
    "at_temperature",
    "processed",
    "sample",
]


def sample(
    logits: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    positions: torch.Tensor,
    kind: Sampling,
    counts: PenaltyState | None = None,
) -> torch.Tensor:
    """One token per row. It reads nothing on the host, so that it can be captured.

    Args:
        logits: [R, V], any float dtype; not changed. A token at -inf is never drawn. A row that is
            -inf throughout gives token 0. A row with NaN may give any token, and another one in a
            step of another kind.
        fields: the tensors [R] of `FIELDS`. Rows of temperature 0 take the most likely token,
            after penalties.
        positions: [R] int64, index of the drawn token in its sequence.
        kind: what is computed: at least the `SamplingParams.kind` of every row.
        counts: what the rows' penalties need, [R, V]; with PENALIZED only.

    Returns:
        [R] int64. Of equal logits a greedy row takes the first.

    Raises:
        ValueError: a tensor has another shape or dtype, or PENALIZED has no counts.
    """
    _check_rows(logits, fields, positions)
    if logits.shape[0] == 0:
        return positions.new_empty(0)
    if kind == Sampling.GREEDY:
        return argmax(logits)
    logits = processed(logits, fields, kind, counts)
    race = reference_race
    if logits.device.type == "cuda":
        from graphs.sampling.triton.race import launch_race as race
    return race(logits, fields["temperature"], fields["seed"], positions)


def processed(
    logits: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    kind: Sampling,
    counts: PenaltyState | None = None,
) -> torch.Tensor:
    """Logits [R, V] after penalties and filters, before the temperature; arguments of `sample`."""
    if kind >= Sampling.PENALIZED:
        logits = penalized(logits, fields, _checked(counts, logits))
    if kind >= Sampling.FILTERED:
        logits = filtered(logits, fields)
    return logits


def at_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] over the rows' temperatures [R], in float32; at temperature 0 as they are."""
    temperature_R1 = temperatures.unsqueeze(1)
    divisor_R1 = torch.where(temperature_R1 > 0, temperature_R1.clamp(min=LEAST_TEMPERATURE), 1.0)
    return logits.float() / divisor_R1


def _check_rows(
    logits: torch.Tensor, fields: Mapping[str, torch.Tensor], positions: torch.Tensor
) -> None:
    if logits.dim() != 2 or not logits.dtype.is_floating_point or logits.shape[1] == 0:
        raise ValueError(
            "logits must be [num_rows, vocab_size] of a floating point type, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    rows = [(positions, "positions", torch.int64)]
    rows += [(fields.get(name), f"fields[{name!r}]", dtype) for name, (dtype, _) in FIELDS.items()]
    for x, name, dtype in rows:
        if x is None:
            raise ValueError(f"{name} must be given, got only {', '.join(fields)}")
        if x.dtype != dtype or x.shape != logits.shape[:1] or x.device != logits.device:
            raise ValueError(
                f"{name} must be {dtype} of shape {list(logits.shape[:1])} on {logits.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )


def _checked(counts: PenaltyState | None, logits: torch.Tensor) -> PenaltyState:
    if counts is None:
        raise ValueError("counts must be a PenaltyState with kind PENALIZED, got None")
    if counts.output_counts.shape != logits.shape:
        raise ValueError(
            f"counts must have the shape of logits, {list(logits.shape)}, "
            f"got {list(counts.output_counts.shape)}"
        )
    return counts
