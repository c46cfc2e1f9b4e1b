"""Why a capture failed: the operator, the Python line, the kind of the failure and what helps.

CUDA does not say what was not permitted. The traceback has the line; a second run, in which every
operator is watched, finds the operator. And why Dynamo cannot trace a model.
"""

import contextlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ops.compat
from graphs.capture.pool import capturing, is_invalidated

__all__ = ["CaptureError", "Failure", "break_reason", "capturing", "diagnosing", "untraced"]

_TORCH = str(Path(torch.__file__).parent) + os.sep
_GRAPHS = str(Path(__file__).parents[1]) + os.sep
_CAPTURES = str(Path(__file__).parent) + os.sep
_COMPAT = str(Path(attn_ops.compat.__file__).parent) + os.sep
_PYTHON = str(Path(contextlib.__file__).parent) + os.sep
_PASSED = ("failures", "piecewise", "pool", "recorder", "store")
_CAPTURE = re.compile(r"captur", re.IGNORECASE)
_WAITING_CALL = re.compile(r"\b(item|tolist|cpu|numpy|synchronize|wait)\(|to\(\W*cpu\b")
_COPIES = ("aten::_to_copy", "aten::copy_")
_GENERATED_CALL = re.compile(r"torch\.ops\.(\w+)\.(\w+)|\b(aten|extern_kernels)\.(\w+)")


class Failure(Enum):
    """Kinds of failures: what happened, and what to do about it."""

    HOST_SYNC = (
        "the host waits for the device, which runs nothing during capture",
        "keep the value on the device, or compute it on the host before the step",
    )
    OUT_OF_MEMORY = (
        "there is not enough memory",
        "capture fewer or smaller sizes (capture_sizes), or give the cache fewer tokens "
        "(cache_tokens)",
    )
    UNSUPPORTED = (
        "it cannot be recorded: its result's size depends on values, or it synchronizes or "
        "allocates outside torch",
        "use a form of fixed size without host work, or leave the layer out of the graph "
        "(cudagraph_mode PIECEWISE)",
    )
    OTHER = ("an error that may have nothing to do with capture", "see the error above")

    def __init__(self, what: str, advice: str) -> None:
        self.what = what
        self.advice = advice


class CaptureError(RuntimeError):
    """A step could not be captured; nothing of it is kept, and the next capture can succeed.

    Attributes:
        key: of the graph.
        failure: its kind.
        operator: `namespace::name`, or what was called; None: not known.
        line: `file:number in function: code` of the model's own code; empty if not known.
        cause: first line of the error, which is in `__cause__`.
        advice: what helps.
    """

    def __init__(
        self, key: object, failure: Failure, operator: str | None, line: str, cause: str
    ) -> None:
        self.key = key
        self.failure = failure
        self.operator = operator
        self.line = line
        self.cause = cause
        self.advice = failure.advice
        where = f" at {line}" if line else ""
        super().__init__(
            f"step must be capturable, got {operator or 'an error'}{where}: {failure.what}; "
            f"{self.advice}. Key: {key}. Error: {cause}"
        )


@contextlib.contextmanager
def diagnosing(key: object, again: Callable[[], object] | None = None) -> Iterator[None]:
    """Turn an error of warm-up or capture into a `CaptureError` that says where it is from.

    Args:
        key: of the graph.
        again: does what failed once more, capture included, to find the operator; models run
            uncompiled in it. None: the traceback must do.

    Raises:
        CaptureError: from the error. Locals of the frames it went through are cleared, as they
            would keep memory of the pool.
    """
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        found = _explained(key, error, again)
        _let_go(error)
        raise found from error


def _explained(key: object, error: Exception, again: Callable[[], object] | None) -> CaptureError:
    frames = list(traceback.extract_tb(error.__traceback__))
    watch = _second_run(error, again) if again is not None else None
    operator, waits = _operator_of(frames), False
    refused = bool(_CAPTURE.search(str(error)))
    if watch is not None and watch.culprit is not None:
        operator = watch.culprit.name().partition(".")[0]
        waits = torch.Tag.data_dependent_output in watch.culprit.tags
        refused |= watch.invalidated
        frames = watch.frames
    site = _site(frames)
    cause = (str(error).splitlines() or [""])[0]
    failure = _kind(error, operator or "", refused, waits, (site.line or "") if site else "")
    return CaptureError(
        key, failure, operator, _described(site), f"{type(error).__name__}: {cause}"
    )


def _kind(error: Exception, operator: str, refused: bool, waits: bool, code: str) -> Failure:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return Failure.OUT_OF_MEMORY
    if not refused:
        return Failure.OTHER
    waits |= operator in _COPIES or "synchronize" in operator
    if waits or (not operator.startswith("aten::") and _WAITING_CALL.search(code)):
        return Failure.HOST_SYNC
    return Failure.UNSUPPORTED


def _let_go(error: BaseException | None) -> None:
    """Clear the locals that an error's traceback keeps, and those of the errors it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# -- the second run --------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Finds the first operator that raises or that invalidates the capture."""

    def __init__(self, outermost: FrameType) -> None:
        super().__init__()
        self.culprit: Any = None
        self.invalidated = False
        self.frames: list[traceback.FrameSummary] = []
        self._outermost = id(outermost)  # not the frame, which holds the error and its tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            self._found(func, list(traceback.extract_tb(error.__traceback__)))
            raise
        if self.culprit is None and is_invalidated():
            self._found(func, [])
        return result

    def _found(self, func: Any, inner: list[traceback.FrameSummary]) -> None:
        if self.culprit is not None:
            return
        self.culprit = func
        self.invalidated = is_invalidated()
        callers = []
        for frame, number in traceback.walk_stack(sys._getframe(1)):
            if id(frame) == self._outermost:
                break
            callers.append((frame, number))
        outer = list(traceback.StackSummary.extract(iter(reversed(callers))))
        self.frames = outer + inner


def _second_run(error: Exception, again: Callable[[], object]) -> Watch | None:
    """What a second run saw; None where it failed in another way, or not at all."""
    watch = Watch(sys._getframe())
    try:
        with torch.compiler.set_stance("force_eager"), watch:
            again()
    except Exception as other:
        same = type(other) is type(error)
        _let_go(other)
        return watch if same else None
    return None


# -- frames ----------------------------------------------------------------------------------------


def _site(frames: list[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame of the model; where the step failed elsewhere, the innermost of ours."""
    passed = (_TORCH, _COMPAT, *_triton(), *(f"{_CAPTURES}{name}.py" for name in _PASSED))
    written = [f for f in frames if _is_written(f) and not f.filename.startswith(passed)]
    outside = [f for f in written if not f.filename.startswith(_GRAPHS)]
    return next(iter((outside or written)[-1:]), None)


def _is_written(frame: traceback.FrameSummary) -> bool:
    """Whether a person wrote it: not FX, not Inductor, and it is not Python's own library."""
    name = frame.filename
    if name.startswith("<") or "torchinductor" in name:
        return False
    return not name.startswith(_PYTHON) or "site-packages" in name or "dist-packages" in name


def _triton() -> list[str]:
    spec = importlib.util.find_spec("triton")
    return [path + os.sep for path in (spec.submodule_search_locations or [])] if spec else []


def _operator_of(frames: list[traceback.FrameSummary]) -> str | None:
    """What the traceback alone shows: a function of torch, or a call in generated code."""
    if not frames:
        return None
    last = frames[-1]
    if last.filename.startswith(_TORCH):
        path = Path(last.filename).relative_to(_TORCH).with_suffix("")
        names = ["torch", *(part for part in path.parts if part != "__init__"), last.name]
        return None if any(name.startswith("_") for name in names) else ".".join(names)
    if not _is_written(last) and (call := _GENERATED_CALL.search(last.line or "")):
        namespace, name = (part for part in call.groups() if part)
        return f"{namespace}::{name}"
    return None


def _described(site: traceback.FrameSummary | None) -> str:
    if site is None:
        return ""
    return f"{site.filename}:{site.lineno} in {site.name}: `{(site.line or '').strip()}`"


def break_reason(text: str) -> str:
    """Why Dynamo breaks a graph, and at which line of the user's code where it says so."""
    title = text.strip().partition("\n")[0]
    explanation = re.search(r"^ *Explanation: (.+)$", text, re.MULTILINE)
    lines = re.findall(r'File "(.+?)", line (\d+)', text.partition("from user code:")[2])
    where = ", at {}:{}".format(*lines[-1]) if lines else ""
    return title + (f": {explanation[1]}" if explanation else "") + where


def untraced(model: Any, error: Exception) -> ValueError:
    """What to do where Dynamo cannot trace the model, or has compiled it too often."""
    name = type(getattr(model, "_orig_mod", model)).__name__
    reason = break_reason(str(error))
    if isinstance(error, FailOnRecompileLimitHit):
        reason = "a model that has changed more often than recompile_limit of torch._dynamo.config"
    return ValueError(
        f"model must be traceable by Dynamo with fullgraph=True, got {name}: {reason}; change "
        "that, use the model uncompiled, or compile it without fullgraph=True"
    )
