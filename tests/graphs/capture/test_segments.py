"""Segments of CUDA graphs as far as a CPU can tell: what ends a capture, and what is empty."""

import contextlib
import warnings

import pytest
import torch

from graphs.capture.piecewise import CUDASegments


class FakePool:
    """Captures nothing; writes down how each capture ends, and warns as torch does."""

    def __init__(self, warned: str = "", error: Exception | None = None) -> None:
        self.warned, self.error = warned, error
        self.events: list[str] = []

    @contextlib.contextmanager
    def capturing(self, graph):
        self.events.append("begin")
        try:
            yield
            if self.error is not None:
                raise self.error
            if self.warned:
                warnings.warn(self.warned, stacklevel=2)
            self.events.append("end")
        except BaseException:
            self.events.append("abort")
            raise


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)


def segments(*arguments) -> tuple[CUDASegments, FakePool]:
    pool = FakePool(*arguments)
    return CUDASegments(pool), pool  # pyright: ignore[reportArgumentType]


def test_an_empty_segment_knows_it():
    recorder, pool = segments("The CUDA Graph is empty. This usually means ...")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorder.segment() as segment:
            assert not segment.is_empty
    assert segment.is_empty
    assert pool.events == ["begin", "end"]


def test_other_warnings_pass():
    recorder, _ = segments("something else")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recorder.segment() as segment:
            warnings.warn("of the step", stacklevel=1)
    assert [str(w.message) for w in caught] == ["of the step", "something else"]
    assert not segment.is_empty


def test_an_error_inside_aborts_once():
    recorder, pool = segments()
    with pytest.raises(KeyError), recorder.segment():
        raise KeyError
    assert pool.events == ["begin", "abort"]


def test_an_error_at_the_end_aborts_once():
    recorder, pool = segments("", RuntimeError("invalidated"))
    with pytest.raises(RuntimeError, match="invalidated"), recorder.segment():
        pass
    assert pool.events == ["begin", "abort"]
