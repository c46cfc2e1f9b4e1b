"""Waves of clients of examples/serve.py, many of which hang up: every answer is the one alone.

A case is a wave. Behind it the session is empty, and sockets and memory are as before.
"""

import argparse
import asyncio
import atexit
import collections
import contextlib
import functools
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import uvicorn

from examples.serve import application
from graphs import AsyncSession, DecodeSession
from tests.kit.models import build_model
from tests.kit.sessions import is_empty
from tests.kit.text import TEXTS, small_tokenizer

CLIENTS = 200
NAME = "small"


def small_session(**options: Any) -> DecodeSession:
    """On a small model in float32, with its tokenizer."""
    tokenizer = small_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    model = build_model("llama", eos_token_id=tokenizer.eos_token_id, **sizes)
    sizes = {"max_batch_size": 16, "max_tokens": 256, "block_size": 4, "cudagraph_mode": "NONE"}
    return DecodeSession(model, tokenizer=tokenizer, **(sizes | options))


@contextlib.contextmanager
def served(session: DecodeSession, max_waiting: int | None = None) -> Iterator[str]:
    """Serve it in a thread; the address of its API."""
    with AsyncSession(session, max_waiting=max_waiting) as opened:
        config = uvicorn.Config(application(session, opened, NAME), port=0, log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


class Cases:
    """Requests, and the texts that a session generates for each alone."""

    def __init__(self, session: DecodeSession, number: int = 60) -> None:
        rng, self.asked, self.wanted = random.Random(0), [], []
        words = " ".join(TEXTS).split()
        for _ in range(number):
            prompt = " ".join(rng.choices(words, k=rng.choice([1, 3, 10, 30])))
            asked = {"max_tokens": rng.choice([1, 4, 16, 48]), "n": rng.choice([1, 1, 1, 2])}
            if rng.random() < 0.5:
                asked |= {"temperature": rng.choice([0.7, 1.5]), "seed": rng.randrange(2**31)}
                asked |= {"top_p": rng.choice([1.0, 0.9])}
            if rng.random() < 0.3:
                asked |= {"stop": [rng.choice("aeiou")]}
            own = {name: value for name, value in asked.items() if name != "max_tokens"}
            results = session.generate([prompt], asked["max_tokens"], **own)
            self.asked.append({"model": NAME, "prompt": prompt} | asked)
            self.wanted.append([result.text for result in results])


class Wave:
    """Clients that ask at the same time, and what became of their requests."""

    def __init__(self, client: openai.AsyncOpenAI, cases: Cases, seed: int, each: int) -> None:
        self.client, self.cases, self.seed, self.each = client, cases, seed, each
        self.counts = collections.Counter[str]()

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        for _ in range(self.each):
            case = rng.randrange(len(self.cases.asked))
            kind = rng.choice([self._whole, self._streamed, self._left, self._given_up, self._bad])
            while True:
                try:
                    await kind(self.cases.asked[case], self.cases.wanted[case], rng)
                    self.counts[kind.__name__[1:]] += 1
                    break
                except openai.RateLimitError:
                    self.counts["refused, asked again"] += 1
                    await asyncio.sleep(rng.uniform(0.05, 0.3))

    async def _whole(self, asked: dict, wanted: list[str], rng: random.Random) -> None:
        answer = await self.client.completions.create(**asked)
        assert [choice.text for choice in answer.choices] == wanted, asked

    async def _streamed(self, asked: dict, wanted: list[str], rng: random.Random) -> None:
        texts, reasons = [""] * len(wanted), [None] * len(wanted)
        async for part in await self.client.completions.create(stream=True, **asked):
            for choice in part.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason
        assert texts == wanted, asked
        assert all(reasons), asked

    async def _left(self, asked: dict, wanted: list[str], rng: random.Random) -> None:
        """Hangs up in the midst of a stream."""
        most, text = rng.randrange(1, 12), ""
        async with await self.client.completions.create(stream=True, **asked) as stream:
            async for part in stream:
                text += "".join(c.text for c in part.choices if c.index == 0)
                if (most := most - 1) == 0:
                    break
        assert wanted[0].startswith(text), asked

    async def _given_up(self, asked: dict, wanted: list[str], rng: random.Random) -> None:
        """Does not wait for the answer."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._whole(asked, wanted, rng), rng.uniform(0, 0.5))

    async def _bad(self, asked: dict, wanted: list[str], rng: random.Random) -> None:
        bad = rng.choice([{"temperature": -1}, {"extra_body": {"fox": 1}}, {"prompt": [10**6]}])
        try:
            await self.client.completions.create(**(asked | bad))
        except openai.BadRequestError:
            return
        raise AssertionError(f"{bad} was taken")


async def wave(url: str, cases: Cases, seed: int, each: int) -> collections.Counter[str]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        made = Wave(client, cases, seed, each)
        await made.run()
    return made.counts


def run(url: str, session: DecodeSession, cases: Cases, seed: int, *, each: int = 5) -> str:
    begin = time.perf_counter()
    counts = asyncio.run(wave(url, cases, seed, each))
    seconds = time.perf_counter() - begin
    wait_until(lambda: session.num_unfinished == 0 and not session._requests)
    assert is_empty(session)
    gc.collect()
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    handles = len(os.listdir("/proc/self/fd"))
    print(
        f"{seed}: {told}; {seconds:.1f} s, {memory / 2**20:.0f} MiB, {handles} handles", flush=True
    )
    return "right"


def search(args: argparse.Namespace) -> Callable[[int], str]:
    session = small_session()
    cases = Cases(session)
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    url = stack.enter_context(served(session, max_waiting=120))
    return functools.partial(run, url, session, cases)
