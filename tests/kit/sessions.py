"""Decode sessions of small sizes, and what tests read of them."""

import pytest
import torch

from graphs import DecodeSession
from graphs.launcher import TokenBuffers

PROMPTS = [[1, 2, 3], [4, 5], [7] * 6]
SIZES = {"max_batch_size": 4, "max_tokens": 64, "block_size": 4}


def make_session(model, **options) -> DecodeSession:
    return DecodeSession(model, **(SIZES | options))


def chunked(model, **options) -> DecodeSession:
    """Computes prompts longer than 16 tokens in chunks."""
    return make_session(model, **({"max_tokens_per_step": 16} | options))


def captured(model, **options) -> DecodeSession:
    """Its steps go through graphs; on a CPU a graph runs the Python of its step again."""
    return make_session(model, **({"debug": "eager_replay"} | options))


def captured_lazily(model, **options) -> DecodeSession:
    return captured(model, **({"lazy_capture": True} | options))


def uncaptured(model, **options) -> DecodeSession:
    return make_session(model, **({"cudagraph_mode": "NONE"} | options))


def poisoned(session: DecodeSession) -> DecodeSession:
    """Its caches are NaN wherever nothing has been written."""
    for cache in session.cache.tensors:
        cache[1:] = 0x7F if cache.dtype == torch.uint8 else float("nan")  # NaN of E4M3 and E5M2
    states = session.cache.states
    for tensor in () if states is None else states.tensors.values():
        tensor.fill_(float("nan"))  # the null slot too
    return session


def refuses(model, match: str, **options) -> None:
    with pytest.raises(ValueError, match=match):
        chunked(model, **options)


def waits(session: DecodeSession, match: str) -> None:
    """No step is made, as the model has changed, and nothing stays launched."""
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            session.step()
        assert session.loop.is_idle
    with pytest.raises(ValueError, match=match):
        session.warm_up()


def tokens_of(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def drain(session, outputs=None) -> dict[int, list[int]]:
    """Step to the end; tokens by request, as they were handed out."""
    outputs = list(outputs or ())
    for _ in range(200):
        if not session.num_unfinished:
            break
        outputs += session.step()
    assert session.num_unfinished == 0
    streamed: dict[int, list[int]] = {}
    for output in outputs:
        streamed.setdefault(output.request_id, []).append(output.token_id)
    return streamed


def drafted(session, prompts, want, propose, **asked):
    """Results of requests with a draft in every step, and how many calls it took.

    Args:
        want: their tokens, by prompt.
        propose: makes a draft of the tokens that come next.
    """
    ids = [session.add(p, len(w), **asked) for p, w in zip(prompts, want, strict=True)]
    num_calls = 0
    while session.num_unfinished and num_calls < 200:
        known = [len(session._requests[i].token_ids) for i in ids]
        rows = zip(ids, want, known, strict=True)
        session.verify_draft({i: propose(tokens[number:]) for i, tokens, number in rows})
        num_calls += 1
    return [session.result(i) for i in ids], num_calls


def is_empty(session) -> bool:
    """Whether nobody owns a block of any kind, nor a slot for states."""
    states = session.cache.states
    if states is not None and states.num_free != states.num_requests:
        return False
    if states is not None and session.scheduler.prefixes.checkpoints.num_planned:
        return False
    pools = [pool for pool in (session.cache.pool, session.cache.window_pool) if pool is not None]
    return all(pool.num_available == pool.num_blocks - 1 for pool in pools)


class _Arrival:
    """An event of a device that copies tokens when the host waits, and not before."""

    def __init__(self, buffers, log) -> None:
        self.buffers, self.log = [x for x in buffers if x is not None], log
        self.drawn = [x.clone() for x in self.buffers]
        for x in self.buffers:
            x.fill_(-9)  # no token: a read before the wait fails the test

    def synchronize(self) -> None:
        for x, drawn in zip(self.buffers, self.drawn, strict=True):
            x.copy_(drawn)
        self.log.append("wait")


def asynchronous(session: DecodeSession) -> list[str]:
    """Make the session's tokens arrive as those of a GPU do.

    Returns a log that grows: "launch" and "wait", in order.
    """
    log: list[str] = []

    class Late(TokenBuffers):
        def copy(self, captured, tensors):
            log.append("launch")
            buffer, logprobs, _ = super().copy(captured, tensors)
            return buffer, logprobs, _Arrival([buffer, logprobs], log)

    session.loop.launcher.buffers = Late(session.max_batch_size)
    return log
