"""`AsyncSession`: tokens, aborts, errors, back pressure and its end, from threads and asyncio."""

import asyncio
import collections
import contextlib
import faulthandler
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from graphs import AsyncSession, Generation
from graphs.async_session import QueueFullError, SessionClosedError
from tests.kit.sessions import PROMPTS, captured_lazily, is_empty, make_session, tokens_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]
PATIENCE = 60  # seconds, of everything that waits
MANY = [[1 + i, 2 + i % 5, 3] * (1 + i % 3) for i in range(20)]
BAD = [99_999]


class Boom(Exception):
    pass


@pytest.fixture
def session(model):
    """Nothing is left in it after the test."""
    made = make_session(model)
    yield made
    assert made._requests == {}
    assert made.num_unfinished == 0
    assert is_empty(made)


@pytest.fixture
def opened(session):
    with AsyncSession(session) as opened:
        yield opened


@pytest.fixture(autouse=True)
def stacks_of_a_deadlock():
    faulthandler.dump_traceback_later(110, exit=False)
    yield
    faulthandler.cancel_dump_traceback_later()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Gate:
    """Steps wait before it, and count themselves."""

    def __init__(self, session, monkeypatch):
        self.reached, self.open, self.step = threading.Event(), threading.Event(), session.loop.step
        self.error, self.num_steps, self.inside = None, 0, lambda: None
        monkeypatch.setattr(session.loop, "step", self)

    def __call__(self):
        self.reached.set()
        assert self.open.wait(PATIENCE)
        self.num_steps += 1
        self.inside()
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.step()


@pytest.fixture
def gate(session, monkeypatch):
    gate = Gate(session, monkeypatch)
    yield gate
    gate.open.set()


# -- tokens ----------------------------------------------------------------------------------------


def test_streams_of_one_loop(model, opened):
    want = make_session(model).generate(MANY, 12)

    async def read(prompt):
        outputs = [output async for output in opened.stream(prompt, 12)]
        assert len({output.request_id for output in outputs}) == 1
        assert [o.finish_reason for o in outputs] == [None] * 11 + ["length"]
        return [output.token_id for output in outputs]

    async def read_all():
        return await asyncio.gather(*(read(prompt) for prompt in MANY))

    assert run(read_all()) == tokens_of(want)


def test_generate_takes_arguments_of_add(model, opened):
    want = make_session(model).generate([PROMPTS[0]], 9, temperature=0.9, seed=3)
    assert run(opened.generate(PROMPTS[0], 9, temperature=0.9, seed=3)) == want[0]


def test_captured_steps_that_are_launched_together(model):
    want = make_session(model).generate(MANY, 12)
    with AsyncSession(captured_lazily(model, decode_steps=3)) as opened:
        handles = [opened.submit(prompt, 12) for prompt in MANY]
        assert [handle.result(PATIENCE) for handle in handles] == want


def test_an_event_loop_is_called_once_a_step(opened, gate):
    async def read_all():
        calls, loop = [], asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), call(*args))
        streams = [opened.stream(prompt, 6) for prompt in PROMPTS]
        gate.open.set()
        for stream in streams:
            assert [o.token_id async for o in stream]
        loop.call_soon_threadsafe = call
        assert len(calls) <= gate.num_steps

    run(read_all())


def test_a_slow_reader_holds_nobody_up(opened):
    async def read():
        slow = opened.stream(PROMPTS[0], 20)
        await anext(slow)
        await opened.generate(PROMPTS[1], 30)
        assert len([output async for output in slow]) == 19

    run(read())
    unread = opened.submit(PROMPTS[0], 20)
    assert opened.submit(PROMPTS[1], 30).result(PATIENCE)
    assert len(list(unread)) == 20


def test_result_waits_no_longer_than_asked(opened, gate):
    handle = opened.submit(PROMPTS[0], 5)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    gate.open.set()
    assert len(handle.result(PATIENCE).token_ids) == 5


# -- aborts ----------------------------------------------------------------------------------------


def test_abort_while_waiting(opened, gate):
    running = [opened.submit(PROMPTS[0], 20) for _ in range(4)]
    waiting = opened.submit(PROMPTS[1], 20)
    assert gate.reached.wait(PATIENCE)
    waiting.abort()  # does not wait for the step
    gate.open.set()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    with pytest.raises(CancelledError):
        list(waiting)
    assert [len(handle.result(PATIENCE).token_ids) for handle in running] == [20] * 4


@pytest.mark.parametrize("by", ["handle", "id"])
def test_abort_while_running(opened, session, by):
    handle = opened.submit(PROMPTS[0], 60)
    first = next(iter(handle))
    opened.abort(handle if by == "handle" else first.request_id)
    with pytest.raises(CancelledError):
        handle.result(PATIENCE)
    assert session._requests == {}


def test_abort_after_the_end(opened):
    handle = opened.submit(PROMPTS[0], 3)
    generation = handle.result(PATIENCE)
    for request in (handle, handle.request_id, 10**6):
        opened.abort(request)
    assert opened.submit(PROMPTS[0], 3).result(PATIENCE) == handle.result() == generation


def test_abort_concerns_its_own_session(model, opened):
    with AsyncSession(make_session(model)) as other:
        handles = [a.submit(PROMPTS[0], 40) for a in (opened, other)]
        next(iter(handles[0]))
        next(iter(handles[1]))
        assert handles[0].request_id == handles[1].request_id
        opened.abort(handles[1])
        assert [len(handle.result(PATIENCE).token_ids) for handle in handles] == [40, 40]


def test_leaving_a_stream(opened, session):
    async def leave():
        async for _ in opened.stream(PROMPTS[0], 60):
            break
        stream = opened.stream(PROMPTS[1], 60)
        await anext(stream)
        await stream.aclose()
        opened.abort(held := opened.stream(PROMPTS[1], 60))
        with pytest.raises(CancelledError):
            await anext(held)
        with pytest.raises(CancelledError):
            await anext(held)
        await asyncio.to_thread(until, lambda: not session._requests)

    run(leave())


@pytest.mark.parametrize("way", ["generate", "stream", "timeout"])
def test_a_cancelled_task(opened, session, gate, way):
    async def read():
        if way == "generate":
            return await opened.generate(PROMPTS[0], 60)
        return [output async for output in opened.stream(PROMPTS[0], 60)]

    async def cancel():
        if way == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(), 0.05)
        else:
            task = asyncio.create_task(read())
            await asyncio.to_thread(gate.reached.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.open.set()
        await asyncio.to_thread(until, lambda: not session._requests)
        assert gate.num_steps <= 2

    run(cancel())


# -- errors ----------------------------------------------------------------------------------------


def test_a_bad_prompt_is_its_callers_alone(opened, gate):
    good, bad = opened.submit(PROMPTS[0], 8), opened.submit(BAD, 8)
    gate.open.set()
    with pytest.raises(ValueError, match="99999"):
        bad.result(PATIENCE)
    with pytest.raises(ValueError, match="temprature"):
        opened.submit(PROMPTS[0], 8, temprature=1).result(PATIENCE)
    with pytest.raises(ValueError, match="99999"):
        list(bad)

    async def ask():
        with pytest.raises(ValueError, match="99999"):
            await opened.generate(BAD)
        with pytest.raises(ValueError, match="99999"):
            await anext(opened.stream(BAD))

    run(ask())
    assert len(good.result(PATIENCE).token_ids) == 8


def test_a_failed_step_ends_all_and_the_next_request_works(model, opened, gate):
    want = make_session(model).generate(PROMPTS[:1], 8)
    gate.inside = lambda: setattr(gate, "error", Boom() if gate.num_steps in (3, 4, 5) else None)

    async def ask():
        handles = [opened.submit(prompt, 20) for prompt in MANY[:6]]
        tasks = [asyncio.create_task(opened.generate(prompt, 20)) for prompt in MANY[:6]]
        stream = opened.stream(MANY[6], 20)
        await asyncio.sleep(0)
        gate.open.set()
        for task in tasks:
            with pytest.raises(Boom):
                await task
        with pytest.raises(Boom):
            [output async for output in stream]
        for handle in handles:
            with pytest.raises(Boom):
                handle.result(PATIENCE)
            with pytest.raises(Boom):
                list(handle)

    run(ask())
    while gate.num_steps < 5:
        with pytest.raises(Boom):
            opened.submit(PROMPTS[0], 8).result(PATIENCE)
    assert opened.submit(PROMPTS[0], 8).result(PATIENCE) == want[0]


def test_what_ends_the_thread_ends_its_requests(session, gate, monkeypatch):
    """As `sys.exit` in a hook of the model."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    gate.error = SystemExit("in a hook")
    with AsyncSession(session) as opened:
        handle = opened.submit(PROMPTS[0])
        gate.open.set()
        with pytest.raises(SessionClosedError) as raised:
            handle.result(PATIENCE)
        assert isinstance(raised.value.__cause__, SystemExit)
        with pytest.raises(SessionClosedError):
            opened.submit(PROMPTS[0])


def test_tokens_that_another_call_took_are_an_error(opened, session, gate):
    handle = opened.submit(PROMPTS[0], 1)
    gate.inside = lambda: (gate.step(), session.token_stream.hand_out())
    gate.open.set()
    with pytest.raises(RuntimeError, match="another call"):
        handle.result(PATIENCE)


def test_a_discard_beside_another_call_is_repeated(opened, session, monkeypatch):
    discard, refused = session.discard, []

    def busy(request_id):
        if len(refused) < 2:
            refused.append(request_id)
            raise RuntimeError("beside another call")
        discard(request_id)

    monkeypatch.setattr(session, "discard", busy)
    assert opened.submit(PROMPTS[0], 3).result(PATIENCE)
    assert opened.submit(PROMPTS[0], 3).result(PATIENCE)
    until(lambda: not session._requests)
    assert len(refused) == 2


def test_back_pressure(session, gate):
    with AsyncSession(session, max_waiting=2) as opened:
        handles = [opened.submit(prompt, 4) for prompt in PROMPTS[:2]]

        async def ask():
            with pytest.raises(QueueFullError, match="max_waiting=2"):
                opened.stream(PROMPTS[0])
            with pytest.raises(QueueFullError, match="max_waiting=2"):
                await opened.generate(PROMPTS[0])

        run(ask())
        gate.open.set()
        for handle in handles:
            next(iter(handle))  # they wait no longer
        bad = [opened.submit(BAD) for _ in range(2)]
        for handle in bad:
            with pytest.raises(ValueError, match="99999"):
                handle.result(PATIENCE)
        assert opened.submit(PROMPTS[0], 4).result(PATIENCE)


def test_bad_arguments(model, opened):
    with pytest.raises(ValueError, match="session must be a DecodeSession"):
        AsyncSession(model)
    busy = make_session(model)
    with pytest.raises(ValueError, match="max_waiting must be a positive int, got 0"):
        AsyncSession(busy, max_waiting=0)
    busy.add(PROMPTS[0])
    with pytest.raises(ValueError, match="session must have nothing unfinished, got 1"):
        AsyncSession(busy)
    with pytest.raises(ValueError, match="supported: Handle, Stream, int"):
        opened.abort("all")


# -- the end ---------------------------------------------------------------------------------------


def test_close_with_waiters(model, session, gate):
    opened = AsyncSession(session)
    handles = [opened.submit(prompt, 20) for prompt in MANY]
    assert gate.reached.wait(PATIENCE)

    async def ask():
        tasks = [asyncio.create_task(opened.generate(prompt, 20)) for prompt in PROMPTS]
        stream = opened.stream(PROMPTS[0], 20)
        await asyncio.sleep(0)
        closing = asyncio.create_task(opened.aclose())
        await asyncio.sleep(0.01)
        gate.open.set()
        await closing
        for task in tasks:
            with pytest.raises(SessionClosedError):
                await task
        with pytest.raises(SessionClosedError):
            [output async for output in stream]
        with pytest.raises(SessionClosedError):
            await opened.generate(PROMPTS[0])

    run(ask())
    for handle in handles:
        with pytest.raises(SessionClosedError):
            list(handle)
        with pytest.raises(SessionClosedError):
            handle.result()
        handle.abort()
    opened.close()
    with pytest.raises(SessionClosedError):
        opened.submit(PROMPTS[0])
    assert session.generate(PROMPTS, 5) == make_session(model).generate(PROMPTS, 5)


def test_close_from_inside_of_a_step(session, gate):
    opened = AsyncSession(session)
    gate.inside = opened.close
    handle = opened.submit(PROMPTS[0], 20)
    gate.open.set()
    with pytest.raises(SessionClosedError):
        handle.result(PATIENCE)
    opened.close()


def test_close_from_a_callback_of_the_loop(session):
    async def ask():
        opened = AsyncSession(session)
        task = asyncio.create_task(opened.generate(PROMPTS[0], 60))
        await anext(opened.stream(PROMPTS[1], 60))
        asyncio.get_running_loop().call_soon(opened.close)
        with pytest.raises(SessionClosedError):
            await task
        async with AsyncSession(session) as again:
            await again.generate(PROMPTS[0], 3)
        with pytest.raises(SessionClosedError):
            again.submit(PROMPTS[0])

    run(ask())


def test_a_call_that_exits_ends_no_thread(opened):
    def leave(session):
        raise SystemExit("mine")

    with pytest.raises(SystemExit, match="mine"):
        opened.call(leave)
    assert opened.call(lambda session: session.vocab_size)


def test_a_loop_that_is_closed_early(opened, session, gate):
    async def ask():
        return opened.stream(PROMPTS[0], 60)

    stream = run(ask())
    gate.open.set()
    until(lambda: gate.num_steps and not session._requests)
    assert gate.num_steps < 60
    assert opened.submit(PROMPTS[1], 5).result(PATIENCE)
    del stream


@pytest.mark.slow
def test_a_process_ends_that_does_not_close():
    program = (
        "from graphs import AsyncSession\n"
        "from tests.kit.models import build_model\n"
        "from tests.kit.sessions import make_session\n"
        "opened = AsyncSession(make_session(build_model()))\n"
        "handles = [opened.submit([1, 2], 60) for _ in range(10)]\n"
        "print(len(handles[0].result().token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr


# -- random operations -----------------------------------------------------------------------------


class Stress:
    """Threads that ask, read, abort, and close the session under each other."""

    def __init__(self, model, seed, num_operations):
        longest = zip(MANY, tokens_of(make_session(model).generate(MANY, 20)), strict=True)
        self.cases = [
            (p, n, Generation(t[:n], "length")) for p, t in longest for n in (1, 2, 7, 20)
        ]
        self.session = make_session(model, cache_tokens=128, max_tokens_per_step=16)
        self.step, self.session.loop.step = self.session.loop.step, self.failing_step
        self.fails, self.seed, self.num_operations = False, seed, num_operations
        self.opened, self.lock = AsyncSession(self.session), threading.Lock()
        self.counts = collections.Counter()

    def failing_step(self):
        if self.fails:
            self.fails = False
            raise Boom
        self.step()

    def reopen(self):
        with self.lock:
            self.opened.close()
            assert self.session._requests == {}
            assert is_empty(self.session)
            self.opened = AsyncSession(self.session)

    def count(self, name):
        with self.lock:
            self.counts[name] += 1

    def finish(self, handle, want, seen, aborted):
        """Every request ends once, in one of four ways, and with the right tokens up to there."""
        try:
            for output in handle:
                seen.append(output.token_id)
            assert handle.result(PATIENCE) == want
            assert seen == want.token_ids
            self.count("done")
        except Boom:
            self.count("failed")
        except SessionClosedError:
            self.count("closed")
        except CancelledError:
            assert aborted
            self.count("aborted")
        assert seen == want.token_ids[: len(seen)]

    async def read(self, prompt, length, want, stop):
        tokens = []
        with contextlib.suppress(Boom, SessionClosedError):
            async for output in self.opened.stream(prompt, length):
                tokens.append(output.token_id)
                if len(tokens) == stop:
                    break
            assert len(tokens) in (stop, length)
        assert tokens == want.token_ids[: len(tokens)]

    async def generate(self, prompt, length, want):
        with contextlib.suppress(Boom, SessionClosedError):
            assert await self.opened.generate(prompt, length) == want

    async def tasks(self, draw):
        """Tasks of which some are cancelled, in a loop that may be closed before they end."""
        work = [self.generate(*draw.choice(self.cases)) for _ in range(2)]
        work += [self.read(*draw.choice(self.cases), draw.choice([1, 3, None])) for _ in range(2)]
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(draw.random() * 0.01)
        cancelled = [task for task in tasks if draw.random() < 0.3 and task.cancel()]
        if draw.random() < 0.8:
            ends = asyncio.gather(*tasks, return_exceptions=True)
            for task, end in zip(tasks, await asyncio.wait_for(ends, PATIENCE), strict=True):
                assert end is None or (
                    isinstance(end, asyncio.CancelledError) and task in cancelled
                )

    def work(self, number):
        draw, waiting = random.Random(1000 * self.seed + number), []
        for _ in range(self.num_operations // 8):
            what = draw.random()
            if what < 0.01:
                self.reopen()
            elif what < 0.02:
                self.fails = True
            elif what < 0.1:
                asyncio.run(self.tasks(draw))
            elif what < 0.2:
                with pytest.raises((ValueError, SessionClosedError)):
                    self.opened.submit(BAD).result(PATIENCE)
            elif what < 0.6 and len(waiting) < 6:
                prompt, length, want = draw.choice(self.cases)
                with contextlib.suppress(SessionClosedError):
                    waiting.append((self.opened.submit(prompt, length), want))
                    self.count("asked")
            elif waiting:
                handle, want = waiting.pop(draw.randrange(len(waiting)))
                seen, aborted = [], draw.random() < 0.4
                with contextlib.suppress(Boom, SessionClosedError):
                    for output in handle if draw.random() < 0.5 else ():
                        seen.append(output.token_id)
                        if draw.random() < 0.3:
                            break
                if aborted:
                    handle.abort()
                self.finish(handle, want, seen, aborted)
        for handle, want in waiting:
            self.finish(handle, want, [], aborted=False)


@pytest.mark.parametrize(
    ("num_operations", "seed"),
    [(320, 0), pytest.param(4_000, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_random_operations(model, num_operations, seed):
    stress = Stress(model, seed, num_operations)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(stress.work, range(8)))
    stress.opened.close()
    asked = stress.counts.pop("asked")
    assert asked == sum(stress.counts.values()) > num_operations // 8
    assert stress.counts["done"] > asked // 4
    assert stress.counts.keys() >= {"done", "aborted"}
    assert (stress.session._requests, stress.session.num_unfinished) == ({}, 0)
    assert is_empty(stress.session)
    assert not any(thread.name == "AsyncSession" for thread in threading.enumerate())
