"""A CUDA graph on the CPU: operators and Triton launches on a tape, replayed on the same tensors.

Faithful where capture goes wrong: the model's Python does not run again, host values stay those of
the capture, results land in the tensors of the capture, and recording itself changes nothing:
what it wrote is put back, what it allocated holds NaN until the first replay.

An attention operator is one entry, played by calling it again with the metadata *object* of the
capture, so that TORCH, which reads lengths on the host, can stand for a backend that can be
captured.

What it cannot see: host and device are both the CPU, so operators on host mirrors are played too,
and `tolist` and `numpy` are free, while `item` is refused as a synchronisation.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

WHOLE = (
    "attn_ops::attention",
    "attn_ops::attention_with_lse",
    "attn_ops::varlen_attention",
)
"""Operators that are one entry of a tape whatever they launch."""

_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")
_EMPTY += ("aten::new_empty_strided", "aten::empty_permuted")
_SYNCHRONISES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One operator or launch, its arguments, and the results that its replay overwrites."""

    name: str
    run: Callable[[], Any]
    results: list[tuple[int, torch.Tensor]]  # place among the leaves of what `run` returns


class Tape:
    """What was recorded; `replay` plays it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.kept: list[torch.Tensor] = []  # what it reads and writes by address

    @property
    def is_empty(self) -> bool:
        return not self.entries

    def replay(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            for entry in self.entries:
                new = tree_leaves(entry.run())
                for place, old in entry.results:
                    assert new[place].shape == old.shape, f"{entry.name}: another shape"
                    old.copy_(new[place])


class Taping(TorchDispatchMode):
    """Writes what is called to `tape`, while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self.fresh: dict[int, torch.Tensor] = {}  # by storage: allocated while recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._inside = False  # of an operator that is one entry

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as such, its operators are seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, tape, name = kwargs or {}, self.tape, func._schema.name
        if tape is None:
            return func(*args, **kwargs)
        if name.startswith("attn_ops::") and name not in WHOLE:
            with self:
                return func.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs
                )
        if name not in WHOLE and _synchronises(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self._save(_written(func, args, kwargs))
        with self._one_entry():
            out = func(*args, **kwargs)
        if self.tape is not tape:  # the call broke the graph: it is on no tape
            assert self.tape is not None, "a broken call left no tape"
            for _, result in self._take(self.tape, "", args, kwargs, out):
                result.zero_()  # no values yet, but the model may index with what it makes of them
            return out
        results = self._take(tape, name, args, kwargs, out)
        if results or _mutates(func):
            tape.entries.append(Entry(name, functools.partial(func, *args, **kwargs), results))
        return out

    def launch(self, run: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """A Triton kernel in its interpreter; `run` is what would have been called."""
        bound = functools.partial(run, kernel, *args, **kwargs)
        if self.tape is not None and not self._inside and not kwargs.get("warmup"):
            self._save(_tensors((args, kwargs)))
            self.tape.kept += _tensors((args, kwargs))
            self.tape.entries.append(Entry(kernel.fn.__name__, bound, []))
        with _disable_current_modes():
            return bound()

    def put_back(self) -> None:
        """Make as if nothing had run."""
        with _disable_current_modes():
            for storage, saved in self._before.values():
                storage.copy_(saved)
            for tensor in self.fresh.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        self._before.clear()

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.fresh.values())

    @contextlib.contextmanager
    def _one_entry(self) -> Iterator[None]:
        self._inside, before = True, self._inside
        try:
            yield
        finally:
            self._inside = before

    def _save(self, written: list[torch.Tensor]) -> None:
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.fresh and storage._cdata not in self._before:
                with _disable_current_modes():
                    self._before[storage._cdata] = (storage, storage.clone())

    def _take(
        self, tape: Tape, name: str, args: Any, kwargs: Any, out: Any
    ) -> list[tuple[int, torch.Tensor]]:
        """Keep the results; returns those in memory of their own, but for the uninitialised."""
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        results = []
        for place, value in enumerate(tree_leaves(out)):
            if not isinstance(value, torch.Tensor):
                continue
            tape.kept.append(value)
            key = value.untyped_storage()._cdata
            if key not in given:
                self.fresh[key] = value
                if name not in _EMPTY:
                    results.append((place, value))
        return results


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that the operator's schema says it writes."""
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([given.get(n) for n in names])


def _synchronises(func: Any, args: Any) -> bool:
    """Whether the host waits for the device: values decide what is returned, or its shape."""
    if func._schema.name == "aten::index":
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return any(tag in func.tags for tag in _SYNCHRONISES)


def _mutates(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


class TapeSegments:
    """Tapes one behind another, as `graphs.capture.piecewise.SegmentRecorder`."""

    def __init__(self) -> None:
        self.num_open = 0  # tapes begun and not ended
        self._taping: Taping | None = None
        self._num_bytes = 0

    def warm_up(self, run: Callable[[], Any]) -> None:
        run()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._taping = taping = Taping()
        try:
            with torch.no_grad(), _launches_to(taping), _said_to_capture(taping), taping:
                yield
        finally:
            taping.put_back()
            self._num_bytes += taping.num_bytes
            self._taping = None

    @contextlib.contextmanager
    def segment(self) -> Iterator[Tape]:
        taping = self._taping
        assert taping is not None, "not recording"
        assert taping.tape is None, "begun twice"
        taping.tape = tape = Tape()
        self.num_open += 1
        try:
            yield tape
        finally:
            assert taping.tape is tape, "not begun"
            taping.tape = None
            self.num_open -= 1

    def num_bytes(self) -> int:
        return self._num_bytes

    def release(self) -> None:
        self._num_bytes = 0


class TapeRecorder:
    """Whole steps on tapes."""

    def __init__(self) -> None:
        self.segments = TapeSegments()

    def record(self, run: Callable[[], Any]) -> tuple[Tape, int]:
        segments, before = self.segments, self.segments.num_bytes()
        with segments.recording(), segments.segment() as tape:
            run()
        return tape, segments.num_bytes() - before

    def release(self) -> None:
        self.segments.release()


@contextlib.contextmanager
def _launches_to(taping: Taping) -> Iterator[None]:
    """Hand interpreted Triton kernels to `taping`."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return
    run = InterpretedFunction.run

    def record(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return taping.launch(run, kernel, *args, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", record):
        yield


@contextlib.contextmanager
def _said_to_capture(taping: Taping) -> Iterator[None]:
    """Models ask, and avoid then what cannot be captured (Transformers, where it makes masks)."""

    def is_capturing() -> bool:
        return taping.tape is not None

    with mock.patch("torch.cuda.is_current_stream_capturing", is_capturing):
        yield
