"""Logits through Python code of the caller, a request at a time.

R rows, one a request; V vocabulary; W words of 32 bits.
"""

from asyncio import CancelledError
from typing import Any

import torch

from graphs.requests.batch import Rows
from graphs.sampling.edits import reference_allowed


def by_processors(
    logits_RV: torch.Tensor, step: Rows, allowed_RW: torch.Tensor | None
) -> torch.Tensor:
    """Logits [R, V] in float32 after the processors of the requests that have one, without drafts.

    What a processor raises, and that it leaves no token, becomes the `error` of its request.

    Args:
        allowed_RW: [R, W] int32, bits of the tokens that requests allow otherwise; None: all.
    """
    logits_RV = logits_RV.float()
    for row, s in enumerate(step):
        request = s.request
        if request.processor is not None and s.wants_token:
            ids_1T = torch.tensor([[*request.prompt, *request.token_ids]], device=logits_RV.device)
            try:
                found_1V: Any = request.processor(ids_1T, logits_RV[row : row + 1].clone())
                if getattr(found_1V, "shape", None) != (1, logits_RV.shape[1]):
                    raise ValueError(
                        f"logits_processor must return logits [1, {logits_RV.shape[1]}], "
                        f"got {getattr(found_1V, 'shape', found_1V)!r:.80}"
                    )
                logits_RV[row] = found_1V[0]
                left_1V = logits_RV[row : row + 1].clone()
                if allowed_RW is not None:
                    left_1V = reference_allowed(left_1V, allowed_RW[row : row + 1])
                if len(request.token_ids) < request.min_tokens:
                    left_1V[:, list(request.stops)] = -torch.inf
                if not bool((left_1V > -torch.inf).any()):
                    raise ValueError(
                        "logits_processor must leave a token that can be drawn, got none after "
                        f"{len(request.token_ids)} tokens"
                    )
            except (Exception, CancelledError) as error:  # the others go on
                request.error = error
    return logits_RV
