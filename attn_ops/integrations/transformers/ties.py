"""Routers' near ties, which rounding decides: in a second forward they fall as in the first.

A product of other rows rounds otherwise, and a row whose scores nearly tie then takes other
experts. That is no meeting of rows, but in a deep model of many experts no row would stay equal.

T rows of the batch.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CLOSE = 3e-2
"""Of the largest score: scores that are as near to each other tie."""


class KeptTies(TorchDispatchMode):
    """Notes what `topk` chooses for each row, or chooses so again.

    Args:
        chosen: of each `topk` in turn, the columns of each row; the first forward adds them.
        rows: [T], which of those rows the forward has; None: the first forward.
    """

    def __init__(self, chosen: list[torch.Tensor], rows: torch.Tensor | None) -> None:
        super().__init__()
        self._chosen, self._rows, self._number = chosen, rows, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default or kwargs or args[3:4] == (False,):
            return result
        if args[2:3] not in ((), (-1,), (args[0].dim() - 1,)):
            return result
        if self._rows is None:
            self._chosen.append(result[1])
            return result
        number, self._number = self._number, self._number + 1
        if number >= len(self._chosen):
            return result
        values, ids = result
        return _again(args[0], values, ids, self._chosen[number], self._rows)


def _again(
    scores: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and columns of the first forward's choice, in rows where those nearly tie."""
    dim = next((d for d, n in enumerate(ids.shape[:2]) if n == rows.numel()), None)
    if dim is None or ids.dim() < 2 or chosen.shape[dim] <= int(rows.max()):
        return values, ids
    before = chosen.index_select(dim, rows)
    if before.shape != ids.shape:
        return values, ids
    again = scores.gather(-1, before)
    scale = values.abs().amax(-1, keepdim=True)
    near = ((values - again).abs() <= CLOSE * scale).all(-1, keepdim=True)  # of NaN, never
    return torch.where(near, again, values), torch.where(near, before, ids)
