"""What a session was asked for, what it does instead, why, and what that cost: `session.report()`.

`SessionReport.of` only reads what others decided: `CapturePlan` the modes, keys and the estimate,
`DecodeLauncher` the decode steps, `Selection` the backend. It works at any time, before the warm-up
too.
"""

import dataclasses
import io
from typing import Any, Protocol

import torch
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from attn_ops.backends.registry import Selection
from attn_ops.ops.products.ordered_mm import tried_products
from attn_ops.states import StatePool
from graphs.cache_size import CacheSize
from graphs.capture.failures import CaptureError
from graphs.capture.memory import GraphMemory, human
from graphs.capture.plan import CapturePlan
from graphs.capture.store import CapturedStep
from graphs.capture.verifier import Verifier
from graphs.compilation import Compilation
from graphs.launcher import DecodeLauncher
from graphs.loop import StepLoop
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.requests.blocks import PreemptionCounts
from graphs.requests.prefixes import PrefixCounts
from graphs.runner import StepRunner
from graphs.step.ranks import Ranks


class Reported(Protocol):
    """What a report reads of a `DecodeSession`."""

    original: Any
    device: torch.device
    products: str
    backend_selection: Selection
    plan: CapturePlan
    ranks: Ranks | None
    cache_size: CacheSize
    runner: StepRunner
    verifier: Verifier | None
    compilation: Compilation
    loop: StepLoop


@dataclasses.dataclass(frozen=True)
class DecodeSteps:
    """Decode steps that run without the host."""

    asked: int
    used: int | None  # None: known when the first decode step has been captured
    why: str


def chained(launcher: DecodeLauncher, plan: CapturePlan) -> DecodeSteps:
    """How many decode steps run in a row without the host: what `can_chain` says of graphs."""
    asked, graphs = launcher.runner.num_steps, launcher.runner.graphs
    if asked == 1:
        return DecodeSteps(1, 1, "asked for")
    if graphs is None:
        return DecodeSteps(asked, 1, f"no decode step is captured: {plan.why}")
    if launcher.always_fills:
        return DecodeSteps(asked, 1, "verify compares single steps")
    keys = [k for k in plan.dispatcher.keys(CUDAGraphMode.FULL) if k.query_len == 1]
    if not keys:
        return DecodeSteps(asked, 1, "attention between graphs is planned by the host")
    failed = [key for key in keys if key in graphs.failures]
    if failed == keys:
        return DecodeSteps(asked, 1, "no decode step could be captured")
    decodes = [captured for captured in graphs if captured.key.query_len == 1]
    planned = [captured for captured in decodes if not launcher.can_chain(captured)]
    if planned:
        which = f" of {len(planned)} of {len(decodes)} graphs" if planned != decodes else ""
        name = launcher.runner.builder.backend.name
        return DecodeSteps(asked, 1, f"{name} plans every replay{which} on the host")
    but = [f"1 for {key.in_words()}, whose capture failed" for key in failed]
    largest = max(plan.decode_sizes)
    if largest < launcher.runner.max_batch_size:
        but.append(f"1 for more than {largest} requests")
    if not decodes:
        why = "no decode step has been captured yet"
        return DecodeSteps(asked, None, "; ".join([why, *but]))
    return DecodeSteps(asked, asked, "; ".join(["no decode graph needs the host", *but]))


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
            batch=key.in_words(),
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
            batch=key.in_words(),
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
class SessionReport:
    """A session at the time of the call, in names and numbers only. `print` it, or `as_dict`."""

    model: str
    device: str
    rank: str  # of a model that is split, "0 of 2"; else empty
    products: str  # which projections were merged, or why none
    backend: str
    backend_why: str
    levels: dict[str, str]  # by layer group: which batches may be captured with it
    mode_asked: str
    mode_used: str
    mode_why: str
    mode_in_words: str  # one line of the three
    kinds: list[str]  # a line each: decode, drafted and mixed batches; none where nobody asked
    num_keys: int  # of graphs that may be captured, so far
    graphs: list[GraphLine]  # in the order of their capture
    failures: list[FailureLine]
    mixed_gains: list[str]  # of each captured size of steps with prompts, what was timed
    graph_bytes: int
    graph_bytes_estimated: int | None  # from shapes, for `num_keys`; None: not to be had
    capture_seconds: float
    decode_steps: DecodeSteps
    cache: CacheSize
    num_steps: dict[str, int]  # captured, called
    num_launches: dict[str, int]  # ahead: before the last tokens were read; waited: after
    preemptions: PreemptionCounts | None  # None: whole lengths are reserved
    prefixes: PrefixCounts | None  # None: requests share no prefixes
    batch_invariant: str | None  # what computes products so; None: not asked for
    states: str | None  # what layers keep beside keys and values; None: nothing
    verify: str | None  # "first", "always" or the interval; None: no replay is compared
    num_verified: int  # replays that were compared with a call; a difference was raised
    num_forgiven: int  # tokens of them that differed and were as good as the call's
    compile_seconds: float
    compile_cache: str | None  # what came of the files of compiled models; None: not asked for
    compiler: str | None  # backend of torch.compile; None: not compiled
    no_passes_why: str | None  # why no pass of attn_ops runs; None: they have run, or will
    matches: dict[str, int]  # of each pass that ran for this session
    matches_in_words: dict[str, str]  # by graph, or why there are none
    passes: dict[str, str]  # by pass, what it does to a step, or why nothing; empty: not compiled
    keeps_rows_why: str | None  # why a step without logits computes a row a request all the same
    num_graphs: int  # of Dynamo
    num_breaks: int
    num_recompiles: int

    @classmethod
    def of(cls, session: Reported) -> "SessionReport":
        """What `session` knows of itself."""
        selection, plan, compilation = session.backend_selection, session.plan, session.compilation
        graphs, verifier, counters = session.runner.graphs, session.verifier, compilation.counters
        failures = {} if graphs is None else graphs.failures
        return cls(
            model=type(session.original).__name__,
            device=str(session.device),
            rank="" if session.ranks is None else session.ranks.place,
            products=session.products,
            backend=selection.backend.name,
            backend_why=selection.why,
            levels={name: level.name for name, level in plan.resolution.groups.items()},
            mode_asked=plan.asked.name,
            mode_used=plan.used.name,
            mode_why=plan.why,
            mode_in_words=plan.resolution.in_words(),
            kinds=plan.resolution.lines(),
            num_keys=len(plan.first_keys()),
            graphs=[GraphLine.of(captured) for captured in graphs or ()],
            failures=[FailureLine.of(key, error) for key, error in list(failures.items())],
            mixed_gains=[str(gain) for gain in session.loop.gains],
            graph_bytes=0 if graphs is None else graphs.num_bytes,
            graph_bytes_estimated=plan.estimated_bytes,
            capture_seconds=0.0 if graphs is None else graphs.seconds,
            decode_steps=chained(session.loop.launcher, plan),
            cache=session.cache_size,
            num_steps=dict(session.loop.num_steps),
            num_launches=dict(session.loop.num_launches),
            preemptions=session.loop.scheduler.reservations.counts(),
            prefixes=session.loop.scheduler.prefixes.counts(),
            batch_invariant=tried_products() if session.runner.batch_invariant else None,
            states=_states(session.runner.cache.states),
            verify=None if verifier is None else str(verifier.mode),
            num_verified=0 if verifier is None else verifier.num_checked,
            num_forgiven=0 if verifier is None else verifier.num_forgiven,
            compile_seconds=compilation.seconds,
            compile_cache=compilation.cache_outcome,
            compiler=", ".join(compilation.compilers) or None,
            no_passes_why=compilation.no_passes_why,
            matches=compilation.record.matches(),
            matches_in_words=compilation.record.matches_in_words(),
            passes=compilation.record.summaries(),
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


# -- for people ------------------------------------------------------------------------------------


def _lines(r: SessionReport) -> list[tuple[str, str]]:
    steps, levels = r.decode_steps, ", ".join(f"{n} {level}" for n, level in r.levels.items())
    used = "not known yet" if steps.used is None else f"{steps.used} used"
    taken = f"{steps.asked} asked for, {used}: {steps.why}"
    return [
        ("model", f"{r.model} on {r.device}{r.rank and f', rank {r.rank}'}"),
        ("products", r.products),
        ("backend", f"{r.backend}: {r.backend_why}"),
        ("levels", levels),
        ("CUDA graphs", r.mode_in_words),
        *(("", line) for line in r.kinds),
        ("captured", _captured(r)),
        *((f"  not {line.batch}", f"{line}; {line.advice}") for line in r.failures),
        *(("  " if i else "mixed steps", line) for i, line in enumerate(r.mixed_gains)),
        ("decode steps", f"{steps.used}" if steps.asked == steps.used else taken),
        ("steps", f"{r.num_steps['captured']} captured, {r.num_steps['called']} called"),
        ("cache", str(r.cache)),
        ("launches", _launches(r.num_launches)),
        *((("preemptions", str(r.preemptions)),) if r.preemptions else ()),
        *((("prefixes", str(r.prefixes)),) if r.prefixes else ()),
        *((("batch invariant", r.batch_invariant),) if r.batch_invariant else ()),
        *((("states", r.states),) if r.states else ()),
        ("verified", _verified(r)),
        ("compiled", _compiled(r)),
        *((("compile cache", r.compile_cache),) if r.compile_cache else ()),
        *pass_lines(r),
    ]


def _captured(r: SessionReport) -> str:
    if not r.num_keys:
        return "nothing"
    memory = GraphMemory(r.graph_bytes_estimated)
    for i, line in enumerate(r.graphs):
        memory.add(i, max(0, line.num_bytes))  # less where the allocator gave something back
    return f"{memory}, {r.capture_seconds:.2f} s, of {r.num_keys} keys"


def _states(pool: StatePool | None) -> str | None:
    if pool is None:
        return None
    layers = len({layer for _, layer, _ in pool.tensors})
    drafts = pool.num_draft_tokens
    more = f", {1 + drafts} a request for drafts of {drafts}" if drafts else ""
    kept = len(pool.checkpoint_slots)
    more += f", {kept} of them for prefixes" if kept else ""
    return (
        f"of {layers} layers, {human(pool.bytes_per_request)} a request, {pool.num_slots - 1} "
        f"slots{more} and the null slot, {human(pool.num_bytes)}"
    )


def _launches(number: dict[str, int]) -> str:
    text = f"{number['ahead']} ahead, before the last tokens were read; {number['waited']} after"
    return text if sum(number.values()) else "none yet"


def _compiled(r: SessionReport) -> str:
    if r.compiler is None:
        return "no"
    return (
        f"by {r.compiler}: {r.num_graphs} graphs, {r.num_breaks} breaks, {r.num_recompiles} "
        f"recompiles after warm-up, {r.compile_seconds:.1f} s"
    )


def pass_lines(r: SessionReport) -> list[tuple[str, str]]:
    """What passes matched, what they do to a step, and why rows stay that need not."""
    why = r.no_passes_why
    if why is None and not r.matches:
        when = "the model was compiled before it" if r.compile_seconds else "it is not compiled yet"
        why = f"none has run for this session: {when}"
    lines = [("passes", why or _matched(r))]
    lines += [(name.replace("_", " "), line) for name, line in r.passes.items()]
    return [*lines, *((("rows kept", r.keeps_rows_why),) if r.keeps_rows_why else ())]


def _matched(r: SessionReport) -> str:
    """Matches in a line; of passes without any the names. `dump` and JSON have their reasons."""
    found = [f"{name} {words}" for name, words in r.matches_in_words.items() if r.matches[name]]
    others = [name for name, number in r.matches.items() if not number]
    return "; ".join([*found, *([f"no match: {', '.join(others)}"] if others else [])])


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
