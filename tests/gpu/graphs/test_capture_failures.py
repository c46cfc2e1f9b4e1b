"""Captures that fail on a GPU: what the error says, and that everything works afterwards.

A step is a model and sampling. It is made to fail in the model, in sampling, and by operators
that cannot be recorded; in a pool with a graph in it and in a new one.
"""

import contextlib
import gc
import threading

import pytest
import torch

from attn_ops.compat.cuda_driver import Status, driver
from graphs.capture.addresses import AddressBook
from graphs.capture.failures import CaptureError, Failure, diagnosing
from graphs.capture.pool import GraphPool, capturing, paused_collector

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Made before any capture: cuBLAS allocates when it is first used."""
    Step(Model(), drawing)()
    torch.cuda.synchronize()


class Model(torch.nn.Module):
    """Two products, and between them what the test wants."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.between = between
        self.first = torch.nn.Linear(64, 64, device="cuda")
        self.second = torch.nn.Linear(64, 32, device="cuda")

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(self.between(x))


def greedy(logits):
    return logits.argmax(-1)


def drawing(logits):
    return (logits + torch.rand_like(logits)).argmax(-1)


class Step:
    """A step with static tensors."""

    def __init__(self, model, sample=greedy):
        self.model = model
        self.sample = sample
        self.x = torch.randn(8, 64, device="cuda")
        self.tokens = torch.zeros(8, dtype=torch.int64, device="cuda")

    @torch.no_grad()
    def __call__(self):
        self.tokens.copy_(self.sample(self.model(self.x)))

    def captured(self, pool):
        """As recorders do: a graph that the collector frees meanwhile would end the capture."""
        graph = torch.cuda.CUDAGraph()
        with paused_collector(), pool.capturing(graph):
            self()
        return graph


def another_stream(pool):
    """Not the pool's: torch deals its 32 streams out again and again."""
    return next(s for s in (torch.cuda.Stream() for _ in range(33)) if s != pool.stream)


def warmed(step, pool):
    with torch.cuda.stream(pool.stream):
        step()
    torch.cuda.synchronize()
    return step


def failure_of(step, pool):
    with (
        pytest.raises(CaptureError) as caught,
        diagnosing("key 8", lambda: step.captured(pool)),
    ):
        step.captured(pool)
    return caught.value


def check_graph(step, graph):
    """A replay on new values equals the step itself."""
    step.x.normal_()
    step()
    wanted = step.tokens.clone()
    step.tokens.fill_(-1)
    graph.replay()
    assert torch.equal(step.tokens, wanted)
    assert wanted.unique().numel() > 1


def check_everything_works(pool):
    """Streams, allocators, generators and the pool are as if nothing had happened."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert driver().status(pool.stream.cuda_stream) is Status.NONE
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(4, device="cuda").unique().numel() == 4  # the generator draws outside
    assert torch.ones(4, pin_memory=True).is_pinned()
    step = warmed(Step(Model()), pool)
    graph = step.captured(pool)
    check_graph(step, graph)
    step = warmed(Step(Model(), drawing), pool)
    graph = step.captured(pool)  # and inside
    drawn = set()
    for _ in range(8):
        graph.replay()
        drawn.add(tuple(step.tokens.tolist()))
    assert len(drawn) > 1
    del graph, step


def reads_value(x):
    return x * x.sum().item()


def branches(x):
    return x if x.sum() > 0 else -x


def to_host(x):
    return x + x.cpu().cuda()


def from_host(x):
    return x + torch.tensor([1.0, 2.0]).cuda().sum()


def finds(x):
    return x + torch.nonzero(x).shape[0]


def synchronizes(x):
    torch.cuda.synchronize()
    return x


def takes_too_much(x):
    return x + torch.empty(2**50, device="cuda").sum()


def waits_for_nothing(x):
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()  # and the capture is invalid from here on
    return x + 1


PLACES = {
    "reads a value": (reads_value, "aten::_local_scalar_dense", "HOST_SYNC"),
    "branches on a value": (branches, "aten::_local_scalar_dense", "HOST_SYNC"),
    "copies to the host": (to_host, "aten::_to_copy", "HOST_SYNC"),
    "copies to the device": (from_host, "aten::_to_copy", "HOST_SYNC"),
    "finds": (finds, "aten::nonzero", "UNSUPPORTED"),
    "synchronizes": (synchronizes, "torch.cuda.synchronize", "HOST_SYNC"),
    "allocates": (takes_too_much, "aten::empty", "OUT_OF_MEMORY"),
}


@pytest.mark.parametrize("place", ["model", "sampling"])
@pytest.mark.parametrize("used", [False, True], ids=["new pool", "used pool"])
@pytest.mark.parametrize("case", PLACES)
def test_failed_capture(case, used, place):
    how, operator, failure = PLACES[case]
    pool = GraphPool()
    good = warmed(Step(Model()), pool)
    graph = good.captured(pool) if used else None
    step = (
        Step(Model(how)) if place == "model" else Step(Model(), lambda logits: greedy(how(logits)))
    )
    error = failure_of(step, pool)
    assert error.failure is Failure[failure], error
    assert error.operator == operator, error
    assert f"in {how.__name__}" in error.line, error
    assert __file__ in error.line
    check_everything_works(pool)
    if graph is not None:
        check_graph(good, graph)


@pytest.mark.parametrize("used", [False, True], ids=["new pool", "used pool"])
def test_error_that_was_caught_on_the_way(used):
    """The next operator complains."""
    pool = GraphPool()
    good = warmed(Step(Model()), pool)
    graph = good.captured(pool) if used else None
    error = failure_of(Step(Model(waits_for_nothing)), pool)
    assert error.failure is Failure.UNSUPPORTED
    assert "captur" in error.cause
    check_everything_works(pool)
    if graph is not None:
        check_graph(good, graph)


def test_error_that_was_caught_at_the_end():
    """Nothing complains, yet the capture is invalid: it must not pass for a graph."""
    pool = GraphPool()
    step = warmed(Step(Model()), pool)
    graph = torch.cuda.CUDAGraph()

    def record():
        with pool.capturing(graph):
            step()
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match="invalidated without raising"):
        record()
    check_everything_works(pool)


def test_second_stream_that_does_not_come_back():
    pool = GraphPool()
    side = another_stream(pool)

    def forks(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x + 1

    error = failure_of(Step(Model(forks)), pool)
    assert error.failure is Failure.UNSUPPORTED, error
    check_everything_works(pool)
    assert driver().status(side.cuda_stream) is Status.NONE


def test_memory_limit_reached_in_sampling():
    """An allocation that the allocator refuses, in a process that has had most of its memory."""
    pool = GraphPool()
    total = torch.cuda.mem_get_info()[1]

    def sample(logits):
        return greedy(logits + torch.zeros(2**28, device="cuda").sum())

    step = warmed(Step(Model(), sample), pool)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        error = failure_of(step, pool)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert error.failure is Failure.OUT_OF_MEMORY
    assert "in sample" in error.line
    assert "capture_sizes" in str(error)
    check_everything_works(pool)


def test_python_error_in_a_valid_capture():
    def wrong(x):
        raise ValueError("window must be positive, got 0")

    pool = GraphPool()
    error = failure_of(Step(Model(wrong)), pool)
    assert error.failure is Failure.OTHER
    assert error.cause == "ValueError: window must be positive, got 0"
    check_everything_works(pool)


def test_operator_of_a_compiled_model():
    """The generated code calls an operator that waits: it is named, and its line."""
    name = "test_capture_failures::waits"

    @torch.library.custom_op(name, mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    waits.register_fake(torch.empty_like)
    torch._dynamo.reset()
    model = Model(lambda x: waits(x))
    compiled = torch.compile(model, fullgraph=True)
    pool = GraphPool()
    step = warmed(Step(compiled), pool)
    error = failure_of(step, pool)
    assert error.failure is Failure.HOST_SYNC
    assert error.operator == name
    assert "x * x.sum().item()" in error.line
    check_everything_works(pool)
    model.between = lambda x: x
    torch._dynamo.reset()
    step = warmed(Step(torch.compile(model, fullgraph=True)), pool)
    check_graph(step, step.captured(pool))


def test_100_failures_leave_no_memory():
    pool = GraphPool()
    step = Step(Model(reads_value))

    def fail():
        with pytest.raises(RuntimeError):
            step.captured(pool)

    fail()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for _ in range(100):
        fail()
    gc.collect()
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == before
    check_everything_works(pool)


def test_released_pool_gives_its_memory_back_and_opens_again():
    pool = GraphPool()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def large(x):
        return x + torch.zeros(2**26, device="cuda").sum()

    step = warmed(Step(Model(large)), pool)
    torch.cuda.empty_cache()
    first = pool.handle
    graph = step.captured(pool)
    assert torch.cuda.memory_reserved() >= before + 2**28
    del graph
    pool.release()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + 2**27
    assert pool.handle != first
    check_everything_works(pool)


def test_stream_that_is_capturing_is_refused():
    pool = GraphPool()
    outer = torch.cuda.CUDAGraph()
    word = torch.zeros(1, device="cuda")
    with capturing(outer, pool.handle, pool.stream):
        word.add_(1)
        with (
            pytest.raises(RuntimeError, match="must not be capturing"),
            capturing(torch.cuda.CUDAGraph(), None, pool.stream),
        ):
            pass
        word.add_(1)
    outer.replay()
    assert word.item() == 2  # the outer capture was not touched


def test_other_thread_may_use_the_device_during_a_capture():
    pool = GraphPool()
    step = warmed(Step(Model()), pool)
    stream, results = another_stream(pool), []

    def elsewhere():
        with torch.cuda.stream(stream):
            torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(2**22))
            results.append(torch.full((4,), 3.0, device="cuda").sum().item())

    graph = torch.cuda.CUDAGraph()
    with pool.capturing(graph):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        step()
    assert results == [12.0]
    check_graph(step, graph)


def test_moved_tensors_on_the_device():
    model = Model()
    caches = [torch.zeros(4, 2, 4, 2, 8, device="cuda") for _ in range(3)]
    host = torch.zeros(4, pin_memory=True)
    book = AddressBook.of(kv_caches=caches, weights=model, host=host, mirror=torch.zeros(4))
    assert "host" in book.places
    assert "mirror" not in book.places
    assert book.moved() == []
    model.first.weight.data = model.first.weight.data.clone()
    caches[1] = caches[1].clone()
    assert sorted(book.moved()) == ["kv_caches[1]", "weights.first.weight"]
