"""Sampling parameters as the tensors that `graphs.sampling.sample` reads."""

from collections.abc import Sequence

import torch

from graphs.sampling import FIELDS, SamplingParams


def stacked(
    params: Sequence[SamplingParams], device: torch.device | str = "cpu", default_seed: int = 0
) -> dict[str, torch.Tensor]:
    """The tensors [R] that `sample` reads, one entry a request."""
    columns = zip(*(p.values(default_seed) for p in params), strict=True)
    return {
        name: torch.tensor(column, dtype=dtype, device=device)
        for (name, (dtype, _)), column in zip(FIELDS.items(), columns, strict=True)
    }
