"""What a session was asked for, what it does instead, why, and what that cost: `session.report()`.

`SessionReport.of` only reads: it works at any time, without graphs and before the warm-up too.
"""

import dataclasses
import io
from typing import Any, Protocol

import torch
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from attn_ops.backends.registry import Selection
from fx_passes.observe import Recorder
from graphs.ahead import Pilot
from graphs.capture.failures import CaptureError
from graphs.capture.graphs import CapturedStep, StepGraphs
from graphs.capture.levels import NOTHING_BROKEN
from graphs.capture.memory import GraphMemory, estimate, human
from graphs.capture.plan import CapturePlan
from graphs.loop import CompileCounters
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.runner import StepRunner
from graphs.verify.verifier import Verifier


class Reported(Protocol):
    """What a report reads of a `DecodeSession`."""

    model: Any
    original: Any
    device: torch.device
    backend_selection: Selection
    max_batch_size: int
    decode_steps: int
    plan: CapturePlan
    runner: StepRunner
    pilot: Pilot
    counters: CompileCounters
    verifier: Verifier | None
    num_steps: dict[str, int]
    compile_record: Recorder
    compile_seconds: float

    @property
    def graphs(self) -> StepGraphs | None: ...

    @property
    def capture_sizes(self) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class GraphLine:
    """One captured step."""

    batch: str  # its key, in words
    num_tokens: int
    num_reqs: int
    uniform: bool
    sampling: str
    mode: str  # FULL or PIECEWISE
    num_bytes: int  # by which the pool grew
    seconds: float  # of its capture
    num_replays: int
    needs_host: bool  # none may follow another without the host

    @classmethod
    def of(cls, captured: CapturedStep) -> "GraphLine":
        key = captured.key
        return cls(
            batch=in_words(key),
            num_tokens=key.num_tokens,
            num_reqs=key.num_reqs,
            uniform=key.uniform,
            sampling=key.sampling.name,
            mode=captured.mode.name,
            num_bytes=captured.graph.num_bytes,
            seconds=captured.seconds,
            num_replays=captured.num_replays,
            needs_host=captured.needs_host,
        )


@dataclasses.dataclass(frozen=True)
class FailureLine:
    """A capture that failed; such steps run uncaptured."""

    batch: str
    failure: str  # its kind
    operator: str | None
    line: str  # of the model's code; empty if not known
    cause: str
    advice: str

    @classmethod
    def of(cls, key: BatchDescriptor, error: CaptureError) -> "FailureLine":
        return cls(
            batch=in_words(key),
            failure=error.failure.name,
            operator=error.operator,
            line=error.line,
            cause=error.cause,
            advice=error.advice,
        )

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"{self.operator or 'an error'}{where}: {self.failure}, {self.cause}"


@dataclasses.dataclass(frozen=True)
class DecodeSteps:
    """Decode steps that run without the host."""

    asked: int
    used: int | None  # None: known when the first decode step has been captured
    why: str


@dataclasses.dataclass(frozen=True)
class SessionReport:
    """A session at the time of the call, in names and numbers only. `print` it, or `as_dict`."""

    model: str
    device: str
    backend: str
    backend_why: str
    levels: dict[str, str]  # by layer group: which batches may be captured with it
    mode_asked: str
    mode_used: str
    mode_why: str
    kinds: list[str]  # a line each: decode, drafted and mixed batches
    num_keys: int  # of graphs that may be captured, so far
    graphs: list[GraphLine]  # in the order of their capture
    failures: list[FailureLine]
    graph_bytes: int
    graph_bytes_estimated: int | None  # from shapes, for `num_keys`; None: not to be had
    capture_seconds: float
    decode_steps: DecodeSteps
    num_steps: dict[str, int]  # captured, called
    verify: str | None  # "first", "always" or the interval; None: no replay is compared
    num_verified: int  # replays that were compared with a call; a difference was raised
    num_forgiven: int  # tokens of them that differed and were as good as the call's
    compile_seconds: float
    passes: dict[str, str]  # by pass, what it does to a step, or why nothing; empty: not compiled
    keeps_rows_why: str | None  # why a step without logits computes a row a request all the same
    num_graphs: int  # of Dynamo
    num_breaks: int
    num_recompiles: int

    @classmethod
    def of(cls, session: Reported) -> "SessionReport":
        """What `session` knows of itself."""
        selection, counters, plan = session.backend_selection, session.counters, session.plan
        graphs, verifier = session.graphs, session.verifier
        failures = {} if graphs is None else graphs.failures
        return cls(
            model=type(session.original).__name__,
            device=str(session.device),
            backend=selection.backend.name,
            backend_why=selection.why,
            levels={name: level.name for name, level in plan.resolution.groups.items()},
            mode_asked=plan.asked.name,
            mode_used=plan.used.name,
            mode_why=plan.why,
            kinds=_kinds(plan),
            num_keys=0 if graphs is None else len(plan.first_keys()),
            graphs=[GraphLine.of(captured) for captured in graphs or ()],
            failures=[FailureLine.of(key, error) for key, error in failures.items()],
            graph_bytes=0 if graphs is None else graphs.num_bytes,
            graph_bytes_estimated=_estimated(session),
            capture_seconds=0.0 if graphs is None else graphs.seconds,
            decode_steps=_decode_steps(session),
            num_steps=dict(session.num_steps),
            verify=None if verifier is None else str(verifier.mode),
            num_verified=0 if verifier is None else verifier.num_checked,
            num_forgiven=0 if verifier is None else verifier.num_forgiven,
            compile_seconds=session.compile_seconds,
            passes=session.compile_record.summaries(),
            keeps_rows_why=session.runner.keeps_rows_why,
            num_graphs=counters.num_graphs,
            num_breaks=counters.num_breaks,
            num_recompiles=counters.num_recompiles,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = Table(title="session", show_header=False, box=None, title_justify="left")
        lines.add_column(style="bold", no_wrap=True)
        lines.add_column(overflow="fold")
        for name, value in _lines(self):
            lines.add_row(name, Text(value))
        yield Group(lines, *([_graph_table(self.graphs)] if self.graphs else []))


def in_words(key: BatchDescriptor) -> str:
    """A key: decode 8; uniform 8 x 4; mixed 64 tokens, 9 requests;
    chunks of 64 tokens, 9 requests, no logits.
    """
    if key.query_len == 1:
        return f"decode {key.num_reqs}"
    if key.uniform:
        return f"uniform {key.num_reqs} x {key.query_len}"
    if not key.logits:
        return f"chunks of {key.num_tokens} tokens, {key.num_reqs} requests, no logits"
    return f"mixed {key.num_tokens} tokens, {key.num_reqs} requests"


# -- what is in use --------------------------------------------------------------------------------


def _kinds(plan: CapturePlan) -> list[str]:
    """As `ModeResolution` found it; nothing is captured in debugging, or any more."""
    found, used = plan.resolution, plan.used
    if plan.debug is None and used is not CUDAGraphMode.NONE:
        return found.lines()
    modes = {
        kind: used.mixed_mode() if kind is None else used.decode_mode() for kind in found.modes
    }
    broken = {
        kind: frozenset(found.groups) if mode is CUDAGraphMode.PIECEWISE else NOTHING_BROKEN
        for kind, mode in modes.items()
    }
    return dataclasses.replace(found, asked=plan.asked, modes=modes, broken=broken).lines()


def _decode_steps(session: Reported) -> DecodeSteps:
    """N steps in a row need a whole graph that neither the host nor a check comes in between."""
    asked, plan, graphs = session.decode_steps, session.plan, session.graphs
    if asked == 1:
        return DecodeSteps(1, 1, "asked for")
    if graphs is None:
        return DecodeSteps(asked, 1, f"no decode step is captured: {plan.why}")
    if session.pilot.always_fills:
        return DecodeSteps(asked, 1, "verify compares single steps")
    keys = [k for k in plan.dispatcher.keys(CUDAGraphMode.FULL) if k.query_len == 1]
    if not keys:
        return DecodeSteps(asked, 1, "attention between graphs is planned by the host")
    failed = [key for key in keys if key in graphs.failures]
    if failed == keys:
        return DecodeSteps(asked, 1, "no decode step could be captured")
    decodes = [captured for captured in graphs if captured.key.query_len == 1]
    planned = [captured for captured in decodes if captured.needs_host]
    if planned:
        which = f" of {len(planned)} of {len(decodes)} graphs" if planned != decodes else ""
        name = session.backend_selection.backend.name
        return DecodeSteps(asked, 1, f"{name} plans every replay{which} on the host")
    but = [f"1 for {in_words(key)}, whose capture failed" for key in failed]
    largest = max(session.capture_sizes)
    if largest < session.max_batch_size:
        but.append(f"1 for more than {largest} requests")
    if not decodes:
        return DecodeSteps(asked, None, "; ".join(["no decode step has been captured yet", *but]))
    return DecodeSteps(asked, asked, "; ".join(["no decode graph needs the host", *but]))


def _estimated(session: Reported) -> int | None:
    """Bytes for all keys, from shapes; None where nothing is captured or a size is not known."""
    plan, config = session.plan, session.original.config.get_text_config()
    keys = [key for _, key in plan.first_keys()]
    if session.graphs is None or plan.debug is not None or not keys:
        return None
    names = {n: n for n in ("hidden_size", "intermediate_size", "vocab_size")}
    names["num_layers"] = "num_hidden_layers"
    sizes: dict[str, Any] = {name: getattr(config, of, None) for name, of in names.items()}
    if not all(type(size) is int for size in sizes.values()):
        return None
    return estimate(
        [key.num_tokens for key in keys],
        **sizes,
        dtype_bytes=session.original.dtype.itemsize,
        kernels_per_layer=12 if session.model is not session.original else 30,
        logits_rows=max(key.num_tokens if key.uniform else key.num_reqs for key in keys),
    )


# -- for people ------------------------------------------------------------------------------------


def _lines(r: SessionReport) -> list[tuple[str, str]]:
    steps, levels = r.decode_steps, ", ".join(f"{n} {level}" for n, level in r.levels.items())
    used = "not known yet" if steps.used is None else f"{steps.used} used"
    return [
        ("model", f"{r.model} on {r.device}"),
        ("backend", f"{r.backend}: {r.backend_why}"),
        ("levels", levels),
        ("CUDA graphs", f"{r.mode_asked} asked for, {r.mode_used} used: {r.mode_why}"),
        *(("", line) for line in r.kinds),
        ("captured", _captured(r)),
        *((f"  not {line.batch}", f"{line}; {line.advice}") for line in r.failures),
        ("decode steps", f"{steps.asked} asked for, {used}: {steps.why}"),
        ("steps", f"{r.num_steps['captured']} captured, {r.num_steps['called']} called"),
        ("verified", _verified(r)),
        (
            "compiled",
            f"{r.num_graphs} graphs, {r.num_breaks} breaks, {r.num_recompiles} recompiles after "
            f"warm-up, {r.compile_seconds:.1f} s",
        ),
        *pass_lines(r),
    ]


def _captured(r: SessionReport) -> str:
    if not r.num_keys:
        return "nothing"
    memory = GraphMemory(r.graph_bytes_estimated)
    for i, line in enumerate(r.graphs):
        memory.add(i, max(0, line.num_bytes))  # less where the allocator gave something back
    return f"{memory}, {r.capture_seconds:.2f} s, of {r.num_keys} keys"


def pass_lines(r: SessionReport) -> list[tuple[str, str]]:
    """What passes do to a step, and why rows stay that they could do without."""
    lines = [(name.replace("_", " "), line) for name, line in r.passes.items()]
    return [*lines, *((("rows kept", r.keeps_rows_why),) if r.keeps_rows_why else ())]


def _verified(r: SessionReport) -> str:
    if r.verify is None:
        return "no replay"
    text = f"{r.num_verified} replays compared with calls (verify={r.verify})"
    return text + (f"; {r.num_forgiven} tokens as good as the call's" if r.num_forgiven else "")


def _graph_table(graphs: list[GraphLine]) -> Table:
    table = Table(box=None, title="graphs", title_justify="left")
    for name in ("batch", "sampling", "mode"):
        table.add_column(name)
    for name in ("bytes", "ms", "replays"):
        table.add_column(name, justify="right", no_wrap=True)
    for g in graphs:
        cells = (g.batch, g.sampling.lower(), g.mode, human(g.num_bytes))
        table.add_row(*cells, f"{1000 * g.seconds:.1f}", str(g.num_replays))
    return table
