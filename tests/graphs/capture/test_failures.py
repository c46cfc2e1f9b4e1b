"""What `CaptureError` says of failures, here of operators that a mode refuses as CUDA does.

tests/gpu/graphs/test_capture_failures.py has the same inside real captures.
"""

import contextlib
import gc
import traceback
import weakref
from pathlib import Path

import pytest
import torch

from attn_ops.compat.failed_capture_until_2_16 import end_failed_capture
from graphs.capture import failures, pool
from graphs.capture.failures import CaptureError, Failure, diagnosing
from graphs.capture.memory import estimate

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once")

REFUSAL = "CUDA error: operation not permitted when stream is capturing\nSearch for more"


class Refusing:
    """The CPU kernel of an operator raises, as a capturing stream makes those of CUDA do."""

    def __init__(self, name, error=None):
        self.name = name
        self.error = error or RuntimeError(REFUSAL)

    def __enter__(self):
        self.library = torch.library.Library("aten", "IMPL")
        # Of no file, so that the kernel's own frame is not taken for the model's.
        names = {"error": self.error}
        source = "def kernel(*_, **__):\n    raise error.with_traceback(None)"
        exec(compile(source, "<kernel>", "exec"), names)
        self.library.impl(self.name, names["kernel"], "CPU")

    def __exit__(self, *_):
        self.library._destroy()


class Model(torch.nn.Module):
    """Fails in its forward, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.weight
        return self.how(x)


def reads_value(x):
    return x * x.sum().item()


def branches(x):
    if x.sum() > 0:
        return x
    return -x


def finds(x):
    return x[torch.nonzero(x)]


def converts(x):
    return x.to(torch.float64)


def doubled(x):
    return x + x


def failed(model, name="", error=None, again=True):
    def record():
        with Refusing(name, error) if name else contextlib.nullcontext():
            model(torch.ones(4))

    with pytest.raises(CaptureError) as caught, diagnosing("key 8", record if again else None):
        record()
    return caught.value


@pytest.mark.parametrize(
    ("how", "operator", "failure", "line"),
    [
        (reads_value, "aten::_local_scalar_dense", "HOST_SYNC", "return x * x.sum().item()"),
        (branches, "aten::_local_scalar_dense", "HOST_SYNC", "if x.sum() > 0:"),
        (finds, "aten::nonzero", "UNSUPPORTED", "return x[torch.nonzero(x)]"),
        (converts, "aten::_to_copy", "HOST_SYNC", "return x.to(torch.float64)"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_operator_line_and_kind(how, operator, failure, line, compiled):
    model = Model(how)
    if compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="eager")
        model(torch.ones(4))
    error = failed(model, operator)
    assert error.operator == operator
    assert error.failure is Failure[failure]
    assert error.line.startswith(f"{__file__}:")
    assert error.line.endswith(f" in {how.__name__}: `{line}`")
    assert error.key == "key 8"
    assert error.cause == "RuntimeError: " + REFUSAL.splitlines()[0]
    assert isinstance(error.__cause__, RuntimeError)
    for part in (operator, line, error.advice, "key 8", error.cause):
        assert part in str(error)


def test_without_a_second_run_the_traceback_tells():
    error = failed(Model(reads_value), "aten::_local_scalar_dense", again=False)
    assert error.operator is None
    assert error.failure is Failure.HOST_SYNC
    assert "x.sum().item()" in error.line
    error = failed(Model(finds), "aten::nonzero", again=False)
    assert error.failure is Failure.UNSUPPORTED
    assert "torch.nonzero(x)" in error.line


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("tried to allocate"), RuntimeError("CUDA error: out of memory")],
)
def test_out_of_memory(error):
    error = failed(Model(doubled), "aten::add.Tensor", error=error)
    assert error.failure is Failure.OUT_OF_MEMORY
    assert error.operator == "aten::add"
    assert "capture_sizes" in str(error)
    assert "return x + x" in error.line


def test_an_ordinary_error_is_not_blamed_on_capture():
    def wrong(x):
        raise ValueError("head_size must be 64, got 65")

    error = failed(Model(wrong))
    assert error.failure is Failure.OTHER
    assert error.operator is None
    assert error.cause == "ValueError: head_size must be 64, got 65"
    assert "raise ValueError" in error.line


def test_failure_behind_the_model_is_found_in_our_own_code():
    """No frame of a model is on the way; the innermost of `graphs` is named."""
    source = "with diagnosing('key'):\n    estimate([0], **sizes)"
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "num_layers")
    names = {"diagnosing": diagnosing, "estimate": estimate, "sizes": dict.fromkeys(sizes, 1)}
    with pytest.raises(CaptureError) as caught:
        exec(compile(source, "<step>", "exec"), names)
    assert caught.value.cause == "ValueError: rows must be at least 1 each, got 0"
    assert "graphs/capture/memory.py:" in caught.value.line


def test_second_run_that_succeeds_or_fails_otherwise_is_not_believed():
    model = Model(reads_value)

    def record():
        with Refusing("aten::_local_scalar_dense"):
            model(torch.ones(4))

    def other():
        with Refusing("aten::mul.Tensor", TypeError("unrelated")):
            model(torch.ones(4))

    for again in (lambda: None, other):
        with pytest.raises(CaptureError) as caught, diagnosing("key", again):
            record()
        assert caught.value.operator is None
        assert "x.sum().item()" in caught.value.line


def test_tensors_on_the_way_are_not_kept_by_the_error():
    kept = []

    def allocates(x):
        local = x + 1
        kept.append(weakref.ref(local))
        return local.sum().item()

    error = failed(Model(allocates), "aten::_local_scalar_dense")
    gc.collect()
    assert len(kept) == 2
    assert all(ref() is None for ref in kept), error


def test_what_is_no_error_passes():
    with diagnosing("key"):
        pass
    with pytest.raises(KeyboardInterrupt), diagnosing("key"):
        raise KeyboardInterrupt
    inner = failed(Model(doubled), "aten::add.Tensor")
    with pytest.raises(CaptureError) as caught, diagnosing("another key"):
        raise inner
    assert caught.value is inner


def test_files_that_lines_are_not_blamed_on_are_there():
    """A file that moves away would be named as the place of the error."""
    for name in failures._PASSED:
        assert Path(failures._CAPTURES, f"{name}.py").is_file(), name


def test_work_arounds_are_not_the_models_lines():
    """The repair of a failed capture is called by the capture: neither is where a model failed."""
    frames = [
        traceback.FrameSummary("/home/user/model.py", 7, "forward", line="x.item()"),
        traceback.FrameSummary(pool.__file__, 1, "capturing", line="a"),
        traceback.FrameSummary(end_failed_capture.__code__.co_filename, 2, "end", line="b"),
    ]
    for count in (1, 2, 3):
        site = failures._site(frames[:count])
        assert site is not None
        assert site.filename == "/home/user/model.py"
