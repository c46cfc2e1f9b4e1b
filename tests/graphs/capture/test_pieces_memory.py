"""Recording in pieces: memory, failures, and the hook around attention."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from attn_ops import AttentionSpec, attention
from attn_ops.ops import breaks
from graphs.capture.piecewise import PiecewiseGraph, over_memory_of, record_parts


def everything(call) -> bool:
    return True


class Counted:
    """Segments that own nothing, and count what is open."""

    is_empty = False

    def __init__(self, fail_at=None):
        self.events, self.fail_at = [], fail_at

    def warm_up(self, run):
        run()

    @contextlib.contextmanager
    def recording(self):
        self.events.append("enter")
        try:
            yield
        finally:
            self.events.append("exit")

    def _happens(self, event):
        self.events.append(event)
        if self.fail_at == len(self.events):
            raise RuntimeError(f"{event} failed")

    @contextlib.contextmanager
    def segment(self):
        self._happens("begin")
        try:
            yield self
        finally:
            self._happens("end")

    def replay(self):
        pass

    def num_bytes(self):
        return 0


def test_memory_of_a_layer_is_not_kept_for_the_next(make_batch):
    batch, alive = make_batch([1, 1], [5, 7]), []

    def run():
        x = batch.q
        for _ in range(4):
            q = x + 1
            x = attention(q, batch.kv_cache, batch.meta, 0.3)
            alive.append((weakref.ref(q), weakref.ref(x)))
            assert not gc.isenabled()
            assert all(r() is None for layer in alive[:-1] for r in layer)

    graph = PiecewiseGraph(record_parts(run, Counted(), everything))
    assert gc.isenabled()
    assert graph.num_breaks == 4
    assert all(r() is None for layer in alive for r in layer)


@pytest.mark.parametrize("fail_at", [None, 2, 3, 4, 5])
def test_what_fails_leaves_nothing_open(make_batch, fail_at):
    """In the model, and at the second to fifth event: begin, end, begin, end."""
    batch = make_batch([1, 1], [5, 7])
    segments = Counted(fail_at)

    def run():
        attention(batch.q, batch.kv_cache, batch.meta, 0.3)
        if fail_at is None:
            raise KeyError("the model")

    with pytest.raises(KeyError if fail_at is None else RuntimeError):
        record_parts(run, segments, everything)
    assert not breaks.hooks
    assert gc.isenabled()
    assert segments.events[-1] == "exit"
    begun = segments.events.count("begin")
    if fail_at is not None and segments.events[fail_at - 1] == "begin":
        begun -= 1  # it failed to
    assert segments.events.count("end") == begun
    parts = record_parts(lambda: run() if fail_at else None, Counted(), everything)
    graph = PiecewiseGraph(parts)
    assert graph.num_breaks == (fail_at is not None)


def test_memory_that_is_not_owned():
    x = torch.arange(24.0).view(2, 3, 4)
    for view in (x, x[:, 1:, 1:3], x.transpose(0, 2), x[1, 2, 3], x[:0], x[0].expand(5, 3, 4)):
        weak = over_memory_of(view)
        assert (weak.shape, weak.stride()) == (view.shape, view.stride())
        assert torch.equal(weak, view)
        assert weak.data_ptr() == view.data_ptr() or not view.numel()
    over_memory_of(x)[1, 2, 3] = -1
    assert x[1, 2, 3] == -1
    owner = weakref.ref(x)
    weak = over_memory_of(x)
    del x, view
    assert owner() is None
    assert weak.shape == (2, 3, 4)


def test_the_hook_is_asked_on_its_thread_and_not_about_itself(make_batch):
    batch, calls = make_batch([1, 1], [5, 7]), []
    wanted = attention(batch.q, batch.kv_cache, batch.meta, 0.3)
    results = []

    def call():
        results.append(attention(batch.q, batch.kv_cache, batch.meta, 0.3))

    def hook(asked):
        calls.append(asked)
        return tuple(r + 1 for r in asked.run())

    with breaks.around_attention(hook):
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        with pytest.raises(AssertionError, match="hooked already"):
            breaks.around_attention(hook).__enter__()
    call()
    assert len(calls) == 1
    assert torch.equal(results[0], wanted + 1)
    assert torch.equal(results[1], wanted)
    assert torch.equal(results[2], wanted)
    assert calls[0].spec == AttentionSpec(4, 2, 8, torch.float32)


@pytest.mark.parametrize("name", ["attention", "attention_with_lse", "varlen_attention"])
def test_inductor_cuts_its_own_graphs_around_attention(name):
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    operator = getattr(torch.ops.attn_ops, name).default
    graph = torch.fx.Graph()
    assert is_cudagraph_unsafe_fx_node(graph.call_function(operator))
    assert not is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.attn_ops.write_kv.default))
