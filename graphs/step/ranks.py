"""`Ranks`: finds out that ranks of a split model do not run the same steps, before they hang.

Every rank runs the same scheduler on the same requests. What a step is about to compute is summed
up in a number, and the ranks compare their numbers on the CPU before it is launched.
"""

import dataclasses
import datetime
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from attn_ops.integrations.transformers import num_ranks, ranks_of_model
from graphs.options import SessionOptions
from graphs.requests.batch import Rows

PATIENCE = datetime.timedelta(seconds=30)
"""That ranks wait for each other: a rank that has died or hangs is told by the others' error."""


class Ranks:
    """The ranks of one session; every rank makes it at the same time.

    Args:
        model: split by Transformers.
        settings: of the session, which all ranks must have alike.

    Raises:
        ValueError: a rank has other settings.
    """

    def __init__(self, model: Any, settings: Iterable[Any]) -> None:
        self._group: Any = dist.new_group(ranks_of_model(model), timeout=PATIENCE, backend="gloo")
        self._have_met = False
        names = [name for name, _ in model.named_parameters()]
        self._compare("settings of the session", (*settings, *names))

    def meet(self) -> None:
        """Before the model is first called: every rank is there."""
        if not self._have_met:
            self._compare("calls", "start")
            self._have_met = True

    def check(self, step: Rows) -> None:
        """Compare what this step computes with what the other ranks are about to.

        Raises:
            RuntimeError: another rank runs another step, or does not answer.
        """
        rows = [
            (r.id, s.num_tokens, s.num_computed, s.length, r.sampling.seed, r.end)
            for s, r in zip(step, step.requests, strict=True)
        ]
        new = [s.request.prompt for s in step if not s.num_computed]
        self._compare(f"requests of the step, here {[row[0] for row in rows]},", (rows, new))

    def _compare(self, what: str, said: Any) -> None:
        rank = dist.get_rank()
        digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        both = torch.tensor([number, -number], device="cpu")
        try:
            # The least of the numbers, and of the negative ones: equal where all are.
            dist.all_reduce(both, dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} has no answer from the others within {PATIENCE.seconds} s: one has "
                f"ended, hangs, or makes other calls ({error})"
            ) from error
        least, most = both.tolist()
        if least != -most:
            raise RuntimeError(
                "ranks must run the same calls on the same requests, got other "
                f"{what} on rank {rank} than elsewhere"
            )


def ranks_of(model: Any, options: SessionOptions) -> Ranks | None:
    """Those of a split model; None: it is whole.

    Raises:
        ValueError: an option would let ranks decide differently.
    """
    if num_ranks(model) == 1:
        return None
    refused = {
        "compile_cache": options.compile_cache is not None,
        "on_capture_failure": options.on_capture_failure == "continue",
        "cache_tokens": options.cache_tokens is None and next(model.parameters()).is_cuda,
    }
    for name, is_asked in refused.items():
        if is_asked:
            supported = "a number" if name == "cache_tokens" else "the default"
            raise ValueError(
                f"{name} must be the same decision on every rank of a split model, got "
                f"{getattr(options, name)!r}; supported: {supported}"
            )
    names = [field.name for field in dataclasses.fields(options)]
    return Ranks(model, [(name, str(getattr(options, name))) for name in names])
