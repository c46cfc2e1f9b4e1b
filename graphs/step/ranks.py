"""`Ranks`: finds out that ranks of a split model do not run the same steps, before they hang.

Every rank runs the same scheduler on the same requests. What a step is about to compute is summed
up in a number, and the ranks compare their numbers on the CPU before it is launched. A program that
gets its requests on one rank alone tells the others its calls: `lead` there, `follow` elsewhere.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import logging
import pickle
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from attn_ops.integrations.transformers import num_ranks, ranks_of_model
from graphs.options import SessionOptions
from graphs.requests.batch import Rows

PATIENCE = datetime.timedelta(seconds=30)
"""That ranks wait for each other: a rank that has died or hangs is told by the others' error."""

IDLE = datetime.timedelta(days=365)
"""That ranks wait for the next call of the one that leads; one that dies is told at once."""

SHORT = 512
"""Bytes of a call that is told in one message, as that of `step`."""

_LOG = logging.getLogger(__name__)


class RanksDiffer(RuntimeError):
    """Ranks would compute different things, or one does not answer."""


class Ranks:
    """The ranks of one session; every rank makes it at the same time.

    Args:
        model: split by Transformers.
        settings: of the session, which all ranks must have alike.

    Attributes:
        place: of this rank, "0 of 2".
        is_silent: True where another rank shows progress, else None.

    Raises:
        RanksDiffer: a rank has other settings, or another model.
    """

    def __init__(self, model: Any, settings: Iterable[Any]) -> None:
        self._members = ranks_of_model(model)
        self._group = self._new_group(PATIENCE)
        self.place = f"{dist.get_rank()} of {num_ranks(model)}"
        self.is_silent = True if dist.get_rank() != self._members[0] else None
        self._have_met = self._leads = False
        self._calls: Any = None
        self._compare("settings of the session or another model", (*settings, *_signs(model)))

    def meet(self) -> None:
        """Before the model is first called: every rank is there."""
        if not self._have_met:
            self._compare("calls", "start")
            self._have_met = True

    def check(self, step: Rows) -> None:
        """Compare what this step computes with what the other ranks are about to.

        Raises:
            RanksDiffer: another rank runs another step, or does not answer.
        """
        rows = [
            (r.id, s.num_tokens, s.num_computed, s.length, r.sampling.seed, r.end)
            for s, r in zip(step, step.requests, strict=True)
        ]
        new = [s.request.prompt for s in step if not s.num_computed]
        self._compare(f"requests of the step, here {[row[0] for row in rows]},", (rows, new))

    def listen(self, first: bool) -> None:
        """Before `tell` and `hear`, on every rank; `first`: this one leads.

        Raises:
            ValueError: it is the other way round.
        """
        if first != (dist.get_rank() == self._members[0]):
            raise ValueError(
                f"rank {self._members[0]} must lead and the others follow, got rank "
                f"{dist.get_rank()}, which would {'lead' if first else 'follow'}"
            )
        if self._calls is None:
            self._calls = self._new_group(IDLE)
        self._leads = first

    def tell(self, name: str, *arguments: Any) -> None:
        """Where this rank leads: what it is about to call, to all that follow.

        Raises:
            ValueError: an argument, such as a function of one process, cannot be sent.
            RanksDiffer: another rank does not listen.
        """
        if not self._leads:
            return
        if name == "update_weights":
            raise ValueError(
                "update_weights must be called on every rank, with its own parts, got a call where "
                "one rank leads; supported: outside of lead"
            )
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
        try:
            for message in (sent, held)[: 1 + (held.numel() > SHORT - 8)]:
                work = dist.broadcast(message, self._members[0], self._calls, async_op=True)
                work.wait(PATIENCE)  # pyright: ignore[reportOptionalMemberAccess]
        except RuntimeError as error:
            self._leads, self._calls = False, None
            raise RanksDiffer(
                f"{name} must be heard by all ranks within {PATIENCE.seconds} s, got no answer: "
                f"one has ended, hangs, or follows no more ({error})"
            ) from error

    def hear(self) -> tuple[Any, ...]:
        """Wait for what the first rank tells.

        Raises:
            RanksDiffer: it has ended.
        """
        heard = torch.zeros(SHORT, dtype=torch.uint8, device="cpu")
        try:
            dist.broadcast(heard, self._members[0], group=self._calls)
            size = int(heard[:8].view(torch.int64))
            held = heard[8 : 8 + size]
            if size > SHORT - 8:
                held = torch.empty(size, dtype=torch.uint8, device="cpu")
                dist.broadcast(held, self._members[0], group=self._calls)
        except RuntimeError as error:
            raise RanksDiffer(
                f"rank {self._members[0]}, which leads, has ended ({error})"
            ) from error
        return pickle.loads(held.numpy().tobytes())  # of a rank of the same program

    def stop(self) -> None:
        """Tell those that follow that this rank leads no more."""
        self.tell("")
        self._leads = False

    def _new_group(self, timeout: datetime.timedelta) -> Any:
        """It ends with this object: it has a thread, and sessions come and go."""
        group: Any = dist.new_group(self._members, timeout=timeout, backend="gloo")
        weakref.finalize(self, dist.destroy_process_group, group).atexit = False
        return group

    def _compare(self, what: str, said: Any) -> None:
        rank = dist.get_rank()
        digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        both = torch.tensor([number, -number], device="cpu")
        try:
            # The least of the numbers, and of the negative ones: equal where all are.
            dist.all_reduce(both, dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise RanksDiffer(
                f"rank {rank} has no answer from the others within {PATIENCE.seconds} s: one has "
                f"ended, hangs, or makes other calls ({error})"
            ) from error
        least, most = both.tolist()
        if least != -most:
            raise RanksDiffer(
                "ranks must run the same calls on the same requests, got other "
                f"{what} on rank {rank} than elsewhere"
            )


def _signs(model: Any) -> Iterator[Any]:
    """What tells a model from another, and is the same on all ranks: not its parts."""
    config = model.config.to_dict()
    yield {key: config[key] for key in sorted(config) if key[0] != "_" and "distributed" not in key}
    yield [name for name, _ in model.named_parameters()]
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and weight is not None:  # each rank has it whole
            yield name, float(weight.double().sum()), float(weight.double().square().sum())


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

    The others `follow`. A session on one rank leads nobody. A call that Ctrl-C interrupts ends it.

    Raises:
        ValueError: this is not the first rank.
    """
    ranks = session.ranks
    if ranks is None:
        yield
        return
    ranks.listen(first=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the caller's error is the one to see
            ranks.stop()
        raise
    with session.lock:
        ranks.stop()


def follow(session: Any) -> None:
    """On any other rank: make the calls that the first one makes, until it leaves `lead`.

    Raises:
        ValueError: this is the first rank.
        RanksDiffer: the first rank has ended, or this one has computed something else.
    """
    ranks = session.ranks
    if ranks is None:
        raise ValueError("session must be of a model that is split over ranks, got a whole one")
    ranks.listen(first=False)
    while (call := ranks.hear())[0]:
        name, args, kwargs = call
        try:
            getattr(session, name)(*args, **kwargs)
        except RanksDiffer:
            raise
        except Exception:
            # The rank that leads has raised it too; if it has not, the next step tells.
            _LOG.debug("%s has raised on rank %s", name, ranks.place, exc_info=True)
