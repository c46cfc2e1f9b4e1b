"""A session's model is compiled: once before the first step, and once more for every dump."""

import dataclasses
import functools
import inspect
import logging
import weakref
from typing import Any, cast

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from tqdm import tqdm

from attn_ops import Backend, dynamic_batch
from fx_passes.backend import attn_ops
from fx_passes.calls import calls
from fx_passes.failures import refusal
from fx_passes.inductor_slot import SLOT, AtenPipeline
from fx_passes.observe import CompileCounters, Recorder, recorders, recording
from graphs.capture.failures import break_reason
from graphs.capture.pool import paused_collector
from graphs.options import SessionOptions
from graphs.runner import StepRunner
from graphs.saved.cache import CompileCache, batch_text
from graphs.saved.loaded import LoadedModel

logger = logging.getLogger(__name__)

FIXED = "TRITON_FIXED"


class Compilation:
    """Compiles the model of a session, if it is one that Dynamo compiles, by a first call.

    Args:
        runner: calls the model.
        session: its owner, which dumps name. The reference is weak: nothing here keeps it alive.
        options: of the session, which may name a folder for compiled models; None: no folder.
        warns_uncompiled: say so where the model is not compiled.

    Attributes:
        session: a weak reference to its owner.
        compilers: backends that compile the model; see `compilers`.
        counters: graphs, breaks and recompilations.
        record: what the passes did.
        seconds: that the last compilation took.
        cache: files of compiled models; None: nobody asked for them.
    """

    def __init__(
        self,
        runner: StepRunner,
        session: object,
        options: SessionOptions | None = None,
        *,
        warns_uncompiled: bool,
    ) -> None:
        self.runner, self._model = runner, runner.model
        self.compilers = compilers(runner.model)
        self._warns = warns_uncompiled or bool(self.compilers)
        self.counters = CompileCounters()
        self.record = Recorder()
        self.cache: CompileCache | None = None
        if options is not None and options.compile_cache is not None:
            self.cache = CompileCache(
                options.compile_cache, self._model, self.record, batch_text(runner, options)
            )
        self.seconds = 0.0
        self.session = weakref.ref(session)

    @property
    def no_passes_why(self) -> str | None:
        """Why the passes of attn_ops do nothing to this model; None: they have run, or will."""
        if not self.compilers:
            return "not compiled: the passes of attn_ops did not run"
        if self.record.num_graphs or self.record.passes or any(self.compilers.values()):
            return None
        return f"compiled by {', '.join(self.compilers)}: the passes of attn_ops did not run"

    @property
    def cache_outcome(self) -> str | None:
        """What came of the files of compiled models, in a line; None: nobody asked for them."""
        if self.cache is None:
            return None
        model: Any = self.runner.model
        refused = model.refused if isinstance(model, LoadedModel) else None
        return self.cache.outcome + (f"; compiled since then: {refused}" if refused else "")

    def run(self) -> None:
        """Compile for the first time; what is compiled later counts as a recompilation.

        An attempt that failed counts for nothing.

        Raises:
            ValueError: Dynamo cannot trace the model.
        """
        self.record.forget()
        self.counters.num_graphs = self.counters.num_breaks = 0
        bar = tqdm(total=1, desc="compile", unit="model", disable=None, leave=False)
        with bar, recording(self.record), self.counters.watching():
            self._load_or_compile()
            bar.update()
        self.counters.warm()
        if self._warns and self.no_passes_why:
            advice = "torch.compile(model, backend='attn_ops') runs them"
            _warn_once(f"{self._model_name} is {self.no_passes_why}; {advice}")

    def run_again(self) -> None:
        """Forget what was compiled, also of other models, and compile anew."""
        torch._dynamo.reset()
        self.runner.model = self._model
        self._call_model()

    def _load_or_compile(self) -> None:
        if self.cache is None:
            return self._call_model()
        if any(recorder.texts for recorder in recorders()):
            self.cache.outcome = "compiled: a dump shows how"
            return self._call_model()
        self.runner.model = cast(Any, self.cache)
        try:
            self._call_model()
        except BaseException:
            self.runner.model = self._model
            raise
        self.runner.model = cast(Any, self.cache.model)

    def _call_model(self) -> None:
        before, invariant_calls = dict(counters["graph_break"]), [0]
        try:
            with paused_collector(), calls(counts=invariant_calls):
                self.seconds = self.runner.compile(dynamic_batch)
            loaded = self.cache is not None and self.cache.outcome.startswith("loaded")
            if self.runner.batch_invariant and invariant_calls == [0] and not loaded:
                raise ValueError(
                    f"batch_invariant must be False for {self._model_name}, which was compiled "
                    "before without it; call torch._dynamo.reset() first"
                )
        except BackendCompilerFailed as error:
            refused = refusal(error)
            if refused is None:
                raise
            raise ValueError(str(refused)) from error
        except ConstraintViolationError as error:
            found = [text for text, n in counters["graph_break"].items() if n != before.get(text)]
            why = "; ".join(map(break_reason, found)) or "sizes of a batch are fixed in a piece"
            raise ValueError(
                f"model must be traceable by Dynamo in one piece, got {self._model_name}: {why}; "
                "use the model uncompiled, or compile it with fullgraph=True, which names the line "
                "to change; call torch._dynamo.reset() first, for Dynamo remembers the pieces"
            ) from error

    @property
    def _model_name(self) -> str:
        model = self._model
        return type(getattr(model, "_orig_mod", model)).__name__


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether it was compiled, or a module in it (`model.compile()`)."""
    wrapped = hasattr(model, "_orig_mod")
    return wrapped or any(m._compiled_call_impl is not None for m in model.modules())


def invariant_options(
    options: SessionOptions, device: torch.device, *, compiled: bool
) -> SessionOptions:
    """The same with the backend whose bits do not depend on a batch.

    Raises:
        ValueError: it cannot be had.
    """
    name = options.backend.name if isinstance(options.backend, Backend) else options.backend
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    for fits, need, got in (
        (hopper, "a model on a Hopper GPU", f"one on {device}"),
        (compiled, "a compiled model", "one that is not"),
        (name in (None, FIXED), f"backend None or {FIXED!r}", repr(name)),
    ):
        if not fits:
            raise ValueError(f"batch_invariant must be False without {need}, got {got}")
    return dataclasses.replace(options, backend=FIXED)


def compilers(model: torch.nn.Module) -> dict[str, bool]:
    """Backends of torch.compile that compile the model, or modules in it, by name.

    The value is whether the backend runs passes of attn_ops, as far as that can be seen.
    """
    found = {}
    for module in model.modules():
        callbacks = []
        if hasattr(module, "_orig_mod"):
            callbacks.append(getattr(getattr(module, "dynamo_ctx", None), "callback", None))
        if module._compiled_call_impl is not None:
            cells = inspect.getclosurevars(module._compiled_call_impl).nonlocals
            callbacks.append(cells.get("callback"))
        for name, runs_passes in map(_backend, callbacks):
            found[name] = found.get(name, False) or runs_passes
    return found


def _backend(callback: Any) -> tuple[str, bool]:
    """Name of the backend that Dynamo's `callback` wraps, and whether it runs our passes."""
    wrapped = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
    while inner := next((getattr(callback, n) for n in wrapped if hasattr(callback, n)), None):
        callback = inner
    called = getattr(callback, "compiler_fn", None)
    while isinstance(called, functools.partial):
        called = called.func
    slot = (getattr(callback, "config", None) or {}).get(SLOT)
    passes = slot if isinstance(slot, list | tuple) else [slot]
    runs_passes = called is attn_ops or any(isinstance(p, AtenPipeline) for p in passes)
    name = "attn_ops" if called is attn_ops else getattr(callback, "compiler_name", None)
    return name or "another backend", runs_passes


# Cached: a process logs each text once.
@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
