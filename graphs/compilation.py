"""A session's model is compiled: once before the first step, and once more for every dump."""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch._dynamo.utils import counters
from tqdm import tqdm

from attn_ops.integrations.transformers import dynamic_batch
from fx_passes.observe import Recorder, recorders, recording
from graphs.capture.pool import paused_collector
from graphs.runner import StepRunner


class CompileCounters:
    """Graphs, breaks and recompilations of one session.

    Attributes:
        num_graphs: graphs that Dynamo made until `warm()`.
        num_breaks: graph breaks in all.
        num_recompiles: graphs that Dynamo made after `warm()`.
    """

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_breaks = 0
        self.num_recompiles = 0
        self._warm = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        graphs, breaks = _graphs(), _breaks()
        try:
            yield
        finally:
            if self._warm:
                self.num_recompiles += _graphs() - graphs
            else:
                self.num_graphs += _graphs() - graphs
            self.num_breaks += _breaks() - breaks

    def warm(self) -> None:
        """From here on every new graph is a recompilation."""
        self._warm = True


class Compilation:
    """Compiles the model of a session, if it is one that Dynamo compiles, by a first call.

    Args:
        runner: calls the model.
        session: its owner, which dumps name. The reference is weak: nothing here keeps it alive.

    Attributes:
        counters: graphs, breaks and recompilations.
        record: what the passes did.
        seconds: that the last compilation took.
    """

    def __init__(self, runner: StepRunner, session: object) -> None:
        self.runner = runner
        self.counters = CompileCounters()
        self.record = Recorder()
        self.seconds = 0.0
        self._session = weakref.ref(session)

    def joins_dump(self) -> bool:
        """Whether a dump has begun that has not seen this model compiled; from here on it has."""
        unseen = [r for r in recorders() if r.texts and self._session() not in r.sessions]
        for recorder in unseen:
            recorder.sessions.add(self._session())
        return bool(unseen)

    def run(self) -> None:
        """Compile for the first time; what is compiled later counts as a recompilation."""
        bar = tqdm(total=1, desc="compile", unit="model", disable=None, leave=False)
        with bar, recording(self.record), self.counters.watching():
            self._call_model()
            bar.update()
        self.counters.warm()

    def run_again(self) -> None:
        """Forget what was compiled, also of other models, and compile anew."""
        torch._dynamo.reset()
        self._call_model()

    def _call_model(self) -> None:
        with paused_collector():
            self.seconds = self.runner.compile(dynamic_batch)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether it was compiled, or a module in it (`model.compile()`)."""
    wrapped = hasattr(model, "_orig_mod")
    return wrapped or any(m._compiled_call_impl is not None for m in model.modules())


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _breaks() -> int:
    return sum(counters["graph_break"].values())
