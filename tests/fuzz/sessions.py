"""Random sessions and what is called of them: every request gets the tokens that it gets alone.

    python -m tests.fuzz sessions --number 5000

The device hands out no token before the host waits. A seed says it all: `run_session(model, alone,
seed)` runs it again.
"""

import contextlib
import random
from collections.abc import Callable, Hashable
from typing import Any
from unittest import mock

import torch

from attn_ops.states import StatePool
from graphs import DecodeSession
from graphs.requests.checkpoints import Checkpoints
from tests.kit.models import build_model
from tests.kit.sessions import asynchronous, is_empty, make_session, poisoned

LONGEST = 16
"""Tokens of a request."""

SYSTEM = [11, 12, 13, 14, 15, 16, 17, 18, 19]
PROMPTS = [
    [3], [5, 9], [1, 2, 3, 4], list(range(1, 18)), [7] * 9, [60, 61],
    [*SYSTEM, 1], [*SYSTEM, 2, 3, 4], [*SYSTEM, *SYSTEM, 5],
]  # fmt: skip
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 6},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "seed": 7},
]
DRAFTED = 3
"""Samplings without penalties, which drafts need."""

MODES = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"]

Alone = dict[tuple[int, int], list[int]]


def results_alone(model: torch.nn.Module, **changes: Any) -> Alone:
    """Tokens of every prompt and sampling, when nothing else runs."""
    session = make_session(model, max_batch_size=1, cudagraph_mode="NONE", **changes)
    return {
        (p, s): session.generate([prompt], LONGEST, **sampling)[0].token_ids
        for p, prompt in enumerate(PROMPTS)
        for s, sampling in enumerate(SAMPLINGS)
    }


def drawn_options(rng: random.Random) -> dict[str, Any]:
    """Of a session; its cache holds at least the longest request."""
    mode = rng.choice(MODES)
    return {
        "cudagraph_mode": mode,
        "debug": None if mode == "NONE" else "eager_replay",
        "lazy_capture": True,
        "max_batch_size": rng.randrange(1, 6),
        "max_tokens_per_step": rng.choice([3, 8, 16, 100]),
        "cache_tokens": rng.choice([48, 64, 96, 256]),
        "decode_steps": rng.choice([1, 1, 2, 4]),
        "num_draft_tokens": rng.choice([0, 2]),
        "share_prefixes": rng.random() < 0.5,
        "verify": rng.choice([None] * 5 + ["first"]),
        "reserve": rng.choice(["need", "need", "length"]),
    }


def poison_slots(states: StatePool, checkpoints: Checkpoints) -> None:
    """From here on slots are NaN when they are given back, and those of a draft after it.

    Those of checkpoints are when they are taken.
    """
    give, choose = states.give, states.choose

    def fill(slots: tuple[int, ...]) -> None:
        for tensor in states.tensors.values():
            tensor[list(slots)] = float("nan")

    def give_poisoned(request: Hashable) -> None:
        fill(states.slots(request))
        give(request)

    def choose_poisoned(request: Hashable, num_rows: int) -> None:
        choose(request, num_rows)
        fill(states.slots(request)[1:])

    take = checkpoints._taken

    def take_poisoned() -> int | None:
        slot = take()
        fill(() if slot is None else (slot,))
        return slot

    states.give, states.choose = give_poisoned, choose_poisoned
    checkpoints._taken = take_poisoned


class Interrupted(Exception):
    """Raised by a step in its middle."""


class RandomSession:
    """Calls a session at random. `run` raises an AssertionError where a token is wrong."""

    def __init__(self, model: torch.nn.Module, alone: Alone, seed: int, **changes: Any) -> None:
        self.rng, self.alone = random.Random(seed), alone
        self.options = drawn_options(self.rng) | changes
        self.session: DecodeSession = poisoned(make_session(model, **self.options))
        if self.session.device.type == "cpu":
            asynchronous(self.session)
        if self.session.cache.states is not None:
            poison_slots(self.session.cache.states, self.session.scheduler.prefixes.checkpoints)
        self.num_samplings = DRAFTED if self.options["num_draft_tokens"] else len(SAMPLINGS)
        self.want: dict[int, tuple[list[int], str]] = {}
        self.unseen: dict[int, list[int]] = {}  # of each request, what may still be handed out

    def run(self) -> None:
        calls = [self.add] * 6 + [self.step] * 9 + [self.discard, self.generate, self.observe]
        calls += [self.interrupt]
        calls += [self.draft] * 3 if self.options["num_draft_tokens"] else []
        calls += [self.session.forget_prefixes] if self.options["share_prefixes"] else []
        for _ in range(self.rng.randrange(5, 40)):
            self.rng.choice(calls)()
        if self.rng.random() < 0.1:
            self.session.release()
        for _ in range(400):
            if not self.session.num_unfinished:
                break
            self.take(self.session.step())
        self.check()

    def check(self) -> None:
        """All tokens are right, and all blocks are back."""
        session = self.session
        assert session.num_unfinished == 0
        for request, want in self.want.items():
            result = session.result(request)
            assert result is not None
            assert (result.token_ids, result.finish_reason) == want
            assert not self.unseen[request]
            session.discard(request)
        assert is_empty(session)
        assert not session._requests
        assert not session.scheduler.running
        assert not session.scheduler.waiting
        session.loop.collect_all()
        assert session.step() == []

    # -- calls -------------------------------------------------------------------------------------

    def add(self) -> None:
        prompt, more, tokens, reason = self.drawn_request()
        request = self.session.add(PROMPTS[prompt], **more)
        self.want[request], self.unseen[request] = (tokens, reason), list(tokens)

    def generate(self) -> None:
        prompt, more, tokens, _ = self.drawn_request()
        assert self.session.generate([PROMPTS[prompt]], **more)[0].token_ids == tokens

    def discard(self) -> None:
        if self.want:
            request = self.rng.choice(list(self.want))
            del self.want[request], self.unseen[request]
            self.session.discard(request)

    def step(self) -> None:
        self.take(self.session.step())

    def interrupt(self) -> None:
        """A step that raises after its layers have run counts for nothing, and comes again."""
        runner = self.session.runner

        def interrupted(run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> None:
                run(*args, **kwargs)
                raise Interrupted

            return call

        drafts = self.options["num_draft_tokens"] and self.rng.random() < 0.5
        with (
            mock.patch.object(runner, "launch", interrupted(runner.launch)),
            mock.patch.object(runner, "call", interrupted(runner.call)),
            contextlib.suppress(Interrupted),
        ):
            self.draft() if drafts else self.step()

    def observe(self) -> None:
        with self.session.observe_logits(lambda step, logits: None):
            self.step()

    def draft(self) -> None:
        drafts = {}
        for request, (tokens, _) in self.want.items():
            known = len(self.session._requests[request].token_ids)
            right = [*tokens[known:], 1, 2][:2]
            drafts[request] = self.rng.choice([right, [right[0], 5], [3, 4], right[:1]])
        self.take(self.session.verify_draft(drafts))

    def drawn_request(self) -> tuple[int, dict[str, Any], list[int], str]:
        """A prompt, what is asked for it, and the tokens and the end that it gets."""
        prompt = self.rng.randrange(len(PROMPTS))
        sampling = self.rng.randrange(self.num_samplings)
        length = self.rng.randrange(1, LONGEST + 1)
        tokens, reason, stop = self.alone[prompt, sampling][:length], "length", []
        if self.rng.random() < 0.4:
            stop, reason = [self.rng.choice(tokens)], "stop"
            tokens = tokens[: tokens.index(stop[0]) + 1]
        more = {
            "max_new_tokens": length,
            "stop_token_ids": stop,
            "share_prefix": self.rng.random() < 0.9,
            **SAMPLINGS[sampling],
        }
        return prompt, more, tokens, reason

    def take(self, outputs: list[Any]) -> None:
        """Tokens come once and in order."""
        for output in outputs:
            if output.request_id in self.unseen:
                assert output.token_id == self.unseen[output.request_id].pop(0), output


def run_session(model: torch.nn.Module, alone: Alone, seed: int, **changes: Any) -> None:
    """One random session; `changes` of its options."""
    session = RandomSession(model, alone, seed, **changes)
    try:
        session.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, {session.options}") from error


def search(args: Any) -> Callable[[int], str]:
    model = build_model()
    alone = results_alone(model)

    def run(seed: int) -> str:
        run_session(model, alone, seed)
        return "right"

    return run
