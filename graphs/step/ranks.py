"""`Ranks`: finds out that ranks of a split model do not run the same steps, before they hang.

Every rank runs the same scheduler on the same requests. What a step is about to compute is summed
up in a number, and the ranks compare their numbers on the CPU before it is launched. A program that
gets its requests on one rank alone tells the others its calls: `lead` there, `follow` elsewhere.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from attn_ops.integrations.transformers import num_ranks, ranks_of_model
from graphs.options import SessionOptions
from graphs.requests.batch import Rows
from graphs.requests.results import RequestError

PATIENCE = datetime.timedelta(seconds=30)
"""That ranks wait for each other: a rank that has died or hangs is told by the others' error."""

IDLE = datetime.timedelta(days=365)
"""That ranks wait for the next call of the one that leads; one that dies is told at once."""

SHORT = 512
"""Bytes of a call that is told in one message, as that of `step`."""


class Ranks:
    """The ranks of one session; every rank makes it at the same time.

    Args:
        model: split by Transformers.
        settings: of the session, which all ranks must have alike.

    Raises:
        ValueError: a rank has other settings.
    """

    def __init__(self, model: Any, settings: Iterable[Any]) -> None:
        self._model = model
        self._group: Any = dist.new_group(ranks_of_model(model), timeout=PATIENCE, backend="gloo")
        self.place = f"{dist.get_rank()} of {num_ranks(model)}"
        self._have_met = False
        self._calls: Any = None
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

    def listen(self) -> None:
        """Before the first `tell` and `hear`; on every rank."""
        self._first, *_ = members = ranks_of_model(self._model)
        self._calls = dist.new_group(members, timeout=IDLE, backend="gloo")

    def tell(self, name: str, *arguments: Any) -> None:
        """Where this rank leads: what it is about to call, to all that follow.

        Raises:
            ValueError: an argument, such as a function of one process, cannot be sent.
        """
        if self._calls is None or dist.get_rank() != self._first:
            return
        try:
            told = pickle.dumps((name, *arguments))
        except Exception as error:
            raise ValueError(
                f"arguments of {name} must be picklable where one rank leads, got {error}"
            ) from error
        sent = torch.zeros(SHORT, dtype=torch.uint8, device="cpu")
        sent[:8] = torch.tensor([len(told)], device="cpu").view(torch.uint8)
        held = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        sent[8 : 8 + held.numel()] = held[: SHORT - 8]
        dist.broadcast(sent, self._first, group=self._calls)
        if held.numel() > SHORT - 8:
            dist.broadcast(held, self._first, group=self._calls)

    def hear(self) -> tuple[Any, ...]:
        """Wait for what the first rank tells."""
        heard = torch.empty(SHORT, dtype=torch.uint8, device="cpu")
        dist.broadcast(heard, self._first, group=self._calls)
        size = int(heard[:8].view(torch.int64))
        held = heard[8 : 8 + size]
        if size > SHORT - 8:
            held = torch.empty(size, dtype=torch.uint8, device="cpu")
            dist.broadcast(held, self._first, group=self._calls)
        return pickle.loads(held.numpy().tobytes())

    def quit(self) -> None:
        """This rank leads no more."""
        self._calls = None

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


@contextlib.contextmanager
def lead(session: Any) -> Iterator[None]:
    """On the first rank of a split model: inside, calls of the session are made on all ranks.

    The others `follow`. A session on one rank leads nobody.
    """
    ranks = session.ranks
    if ranks is None:
        yield
        return
    ranks.listen()
    try:
        yield
    finally:
        ranks.tell("")
        ranks.quit()


def follow(session: Any) -> None:
    """On any other rank: make the calls that the first one makes, until it leaves `lead`."""
    session.ranks.listen()
    while (call := session.ranks.hear())[0]:
        name, args, kwargs = call
        # What a call raises of its arguments, or of a request, the rank that leads has raised too.
        with contextlib.suppress(ValueError, RequestError):
            getattr(session, name)(*args, **kwargs)
    session.ranks.quit()
