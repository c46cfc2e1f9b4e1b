"""Calls in different CUDA streams: each waits on the device for what the last one has launched."""

import torch

from graphs.context import StreamOrder
from tests.kit.sessions import PROMPTS, asynchronous, captured_lazily, drain, uncaptured


class FakeStream:
    """Remembers which streams it waits for."""

    def __init__(self, handle):
        self.cuda_stream, self.waited = handle, []

    def wait_stream(self, other):
        self.waited.append(other)


def test_another_stream_waits_for_the_last_one(monkeypatch):
    first, second = FakeStream(0), FakeStream(7)
    now = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    handle = lambda index: now[0].cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handle, raising=False)
    order = StreamOrder(torch.device("cuda:0"))
    assert not order.changed()
    now[0] = second
    assert order.changed()
    assert not order.changed()
    assert second.waited == [first]
    now[0] = first
    assert order.changed()
    assert (first.waited, second.waited) == ([second], [first])


def test_a_cpu_has_one_order():
    assert not StreamOrder(torch.device("cpu")).changed()


def test_nothing_goes_on_from_tokens_of_another_stream(model, monkeypatch):
    """Steps are launched ahead within a stream, and tokens are those of one stream."""
    want = uncaptured(model).generate(PROMPTS, 12)
    session = captured_lazily(model, decode_steps=2)
    asynchronous(session)
    answers = iter([False, False, True, False, True, True] + [False] * 99)
    monkeypatch.setattr(session.loop.streams, "changed", lambda: next(answers))
    ids = [session.add(p, 12) for p in PROMPTS]
    drain(session)
    assert [session.result(i) for i in ids] == want
    assert session.loop.num_launches["waited"] == 3  # the first, and behind each change
    assert session.loop.num_launches["ahead"] > 3
