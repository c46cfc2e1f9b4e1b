"""Random schedules on a device of token ids: every row finds the tokens of its own request.

There is no model. A cache holds token ids, and a step reads what its rows would attend to: so
thousands of schedules run in a minute. The next token depends on all tokens before it.
"""

import functools
import random

import pytest
import torch

from attn_ops import AttentionSpec, PagedKVCache
from graphs.requests.batch import NOTHING, After, Rows
from graphs.requests.outputs import TokenStream
from graphs.requests.requests import Request
from graphs.requests.scheduler import Scheduler
from graphs.sampling import SamplingParams
from tests.graphs.requests.test_prefixes import Weights

SYSTEM = (3, 1, 4, 1, 5, 2, 6, 5, 3)
PROMPTS = [(1,), (2, 3), (4,) * 7, SYSTEM, (*SYSTEM, 1, 2), (*SYSTEM, 4, 4, 4, 4, 4), (6,) * 13]
MOST = 14
"""Tokens that are generated for a request."""


@functools.cache
def sequence(prompt: tuple[int, ...]) -> list[int]:
    """The prompt and what follows it, further than any request goes."""
    tokens = list(prompt)
    for _ in range(MOST + 20):
        tokens.append((31 * sum(tokens) + 7 * len(tokens) + tokens[-1] * 3) % 6 + 1)
    return tokens


class Launched:
    """Steps, their rows, and the tables that the device has of them."""

    def __init__(self, rows: Rows, begun: int, num_steps: int, tables, drawn) -> None:
        self.rows, self.begun, self.num_steps = rows, begun, num_steps
        self.tables, self.drawn = tables, drawn

    @property
    def after(self) -> After:
        return After(self.rows, self.begun + self.num_steps)


class Device:
    """Writes token ids into blocks, in the order of the launches."""

    def __init__(self, cache: PagedKVCache) -> None:
        cache.tensors[0][1:] = -1
        self.slots = cache.tensors[0].numpy()[:, 0, :, 0, 0]
        self.size, self.window = cache.block_size, cache.window
        self.cache = cache

    def launch(self, rows: Rows, num_steps: int, last: Launched | None) -> Launched:
        tables = [self.cache.blocks(s.request.id) for s in rows]
        active, drawn = [True] * len(rows), []
        for s, table in zip(rows, tables, strict=True):
            tokens = s.tokens()
            if s.source >= 0:
                assert last is not None
                tokens = [last.drawn[-1][s.source]]
            self.run(s.request, table, s.num_computed, tokens)
        drawn.append([self.drawn(s, 0) for s in rows])
        self.chain(rows, tables, drawn, active, 1, num_steps)
        return Launched(rows, 0, num_steps, tables, drawn)

    def follow(self, last: Launched, num_steps: int) -> Launched:
        begun, drawn = last.begun + last.num_steps, [last.drawn[-1]]
        active = [self.goes_on(s, begun, 0) for s in last.rows]
        self.chain(last.rows, last.tables, drawn, active, begun, begun + num_steps)
        return Launched(last.rows, begun, num_steps, last.tables, drawn[1:])

    def chain(self, rows, tables, drawn, active, begin, end) -> None:
        """Decode steps in a row; who is done stays as it is."""
        for step in range(begin, end):
            for i, s in enumerate(rows):
                active[i] = active[i] and self.goes_on(s, step, drawn[-1][i])
                if active[i]:
                    place = s.num_computed + step
                    self.run(s.request, tables[i], place, [drawn[-1][i]])
            drawn.append([self.drawn(s, step) if a else 0 for s, a in zip(rows, active)])  # noqa: B905

    def goes_on(self, s, step: int, token: int) -> bool:
        """Whether a row takes part: no stop token before, and not at its end."""
        before = sequence(tuple(s.request.prompt))[s.length : s.length + step]
        return s.length + step < s.request.end and not s.request.stops.intersection(before)

    def drawn(self, s, step: int) -> int:
        return sequence(tuple(s.request.prompt))[s.length + step] if s.wants_token else 0

    def run(self, request: Request, table: list[int], first: int, tokens: list[int]) -> None:
        """Write tokens from a position on, then read what the last of them sees."""
        size, truth = self.size, sequence(tuple(request.prompt))
        for place, token in enumerate(tokens, first):
            assert table[place // size], f"request {request.id} has a block for {place}"
            self.slots[table[place // size], place % size] = token
        last = first + len(tokens) - 1
        if request.stops.intersection(truth[len(request.prompt) : last + 1]):
            return  # it has ended, and the host does not know: its token counts for nothing
        for query in (first, last):
            begin = 0 if self.window is None else max(0, query - self.window + 1)
            seen = [int(self.slots[table[p // size], p % size]) for p in range(begin, query + 1)]
            assert seen == truth[begin : query + 1], (request.id, query)


class Schedule:
    """Adds, steps, launches ahead, drops and discards at random."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_steps = rng.choice([1, 1, 2, 4])
        window = rng.choice([None, None, 3, 6])
        spec = AttentionSpec(1, 1, 1, torch.float32, sliding_window=window)
        size = rng.choice([2, 3, 4])
        self.cache = PagedKVCache([spec], num_tokens=rng.choice([30, 36, 50, 90]), block_size=size)
        self.shares = rng.random() < 0.5
        lookahead = rng.choice([self.num_steps, self.num_steps, None])
        most, budget = rng.choice([1, 3, 6]), rng.choice([2, 5, 16, 60])
        weights = Weights() if self.shares else None
        self.scheduler = Scheduler(self.cache, most, budget, weights, lookahead)
        self.known: dict[int, Request] = {}
        self.stream = TokenStream(self.scheduler, self.known)
        self.device = Device(self.cache)
        self.launched: Launched | None = None
        self.last: Launched | None = None
        self.next_id = 0

    def run(self) -> None:
        for _ in range(self.rng.randrange(20, 80)):
            action = self.rng.random()
            if action < 0.3:
                self.add()
            elif action < 0.35 and self.known:
                self.discard(self.rng.choice(list(self.known.values())))
            else:
                self.step()
        for _ in range(2000):
            if not (self.scheduler.waiting or self.scheduler.running or self.launched):
                break
            self.step()
        self.check()

    def check(self) -> None:
        assert not self.scheduler.next_step()
        assert not self.scheduler.waiting
        assert not self.scheduler.running
        for request in self.known.values():
            begin = len(request.prompt)
            truth = sequence(tuple(request.prompt))[begin : begin + request.max_new_tokens]
            ends = [i for i, token in enumerate(truth) if token in request.stops]
            assert request.token_ids == (truth[: ends[0] + 1] if ends else truth)
        assert self.cache.num_free_blocks == self.cache.num_blocks - 1
        assert not self.cache.pool._owners

    def add(self) -> None:
        none, rng = frozenset(), self.rng
        stops = frozenset([rng.randrange(1, 7)]) if rng.random() < 0.3 else none
        request = Request(
            self.next_id, list(rng.choice(PROMPTS)), rng.randrange(1, MOST + 1),
            SamplingParams(seed=0), none, stops, 28,
        )  # fmt: skip
        request.share_prefix = rng.random() < 0.9
        self.next_id += 1
        self.known[request.id] = request
        self.scheduler.waiting.append(request)

    def discard(self, request: Request) -> None:
        self.scheduler.leave(request)
        self.stream.forget(request.id)
        del self.known[request.id]

    def step(self) -> None:
        """As `StepLoop.step`."""
        rng = self.rng
        if self.launched is None:
            rows = self.scheduler.next_step(NOTHING)
            if not rows:
                return
            self.launched = self.last = self.launch(rows, None)
        followed = self.ahead(self.launched) if rng.random() < 0.8 else None
        if rng.random() < 0.05:  # what is launched counts for nothing: the model has changed
            self.launched = self.last = None
            return
        launched = self.launched
        self.stream.collect(launched.rows, launched.drawn)
        self.launched = followed

    def launch(self, rows: Rows, last: Launched | None) -> Launched:
        number = self.num_steps if rows.query_len == 1 else 1
        return self.device.launch(rows, min(number, rows.most), last)

    def ahead(self, launched: Launched) -> Launched | None:
        if self.last is not launched:
            return None
        after, rows = launched.after, launched.rows
        if rows.query_len == 1 and rows.least > after.num_steps:
            number = min(self.num_steps, rows.most - after.num_steps)
            if rows.reach >= after.num_steps + number and self.scheduler.stays(rows, after):
                self.last = self.device.follow(launched, number)
                return self.last
        new = self.scheduler.next_step(after)
        if not new:
            return None
        self.last = self.launch(new, launched)
        return self.last if self.rng.random() < 0.95 else None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("number", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_schedules(number):
    first = 0 if number == 150 else 1000
    for seed in range(first, first + number):
        try:
            Schedule(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
