"""Records what passes do to graphs, for reports and dumps, and counts what Dynamo compiles.

Nothing is recorded unless asked for.
"""

import collections
import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch.fx import Graph

from fx_passes.analysis.graph_ops import operator_name
from fx_passes.base import Pass
from fx_passes.kept import Keeper
from fx_passes.naming import GraphName

Nodes = list[dict[str, Any]]
"""The nodes of a graph as data."""

Describe = Callable[[Graph, dict[str, str]], Nodes]
"""Describes the nodes of a graph, given which pass made which node."""


@dataclasses.dataclass
class PassRecord:
    """One run of one pass over one graph."""

    pass_name: str
    stage: str
    graph_name: str  # "whole model", "decoder layer"
    matches: int
    skipped: list[str]
    num_calls: int = 1  # of the graph in a call of the model; it is compiled once
    reasons: list[str] = dataclasses.field(default_factory=list)  # `skipped` without places
    looks_for: str = "place for it"
    before: str | None = None  # FX text, if the recorder wants texts
    after: str | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    nodes: tuple[Nodes, Nodes] | None = None  # before, after; of a changed graph, if described
    summary: str | None = None  # what it did to a step, in a line, if that is worth a line
    error: str | None = None  # with which it ended; `after` is the graph as it left it
    operators: tuple[dict[str, int], dict[str, int]] | None = None  # before, after; with texts

    def matches_in_words(self) -> str:
        """`1 x 32 layers` for a layer that is compiled once; `0: no equal products`."""
        return _in_words([self])


@dataclasses.dataclass
class Recorder:
    """Collects what happens while it is active.

    Attributes:
        texts: whether graphs are printed before and after each pass.
        describe: describes the nodes of changed and final graphs; None: they are not kept.
        directory: of the dump that is being written, for errors; None: there is none.
        keeper: takes what is compiled, to save it; None: it is not saved.
        passes: runs, in order.
        num_graphs: graphs that Dynamo handed to the backend.
        early_launch: whether the last one's kernels are launched early, and why; None: no GPU.
        final_graphs: the ATen graphs as Inductor gets them, by name.
        final_nodes: their nodes as data, if the recorder describes them.
        output_code: sources that Inductor wrote, or took from its cache, in order of compilation.
        sessions: the decode sessions that compiled their model while this was active.
    """

    texts: bool = False
    describe: Describe | None = None
    directory: Path | None = None
    keeper: Keeper | None = None
    passes: list[PassRecord] = dataclasses.field(default_factory=list)
    num_graphs: int = 0
    early_launch: str | None = None
    final_graphs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    final_nodes: list[Nodes] = dataclasses.field(default_factory=list)
    _made: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    output_code: list[str] = dataclasses.field(default_factory=list)
    sessions: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)

    def forget(self) -> None:
        """Drop what was collected until now."""
        for collected in (self.passes, self.final_graphs, self.final_nodes, self.output_code):
            collected.clear()
        self._made.clear()
        self.num_graphs = 0
        self.early_launch = None

    def matches(self) -> dict[str, int]:
        """Matches of each pass that ran, over all graphs."""
        total: dict[str, int] = {}
        for record in self.passes:
            total[record.pass_name] = total.get(record.pass_name, 0) + record.matches
        return total

    def matches_in_words(self) -> dict[str, str]:
        """Matches of each pass by graph, or the most frequent reason for none.

        `1 x 32 layers, 2 in head` is one match in a layer that stands 32 times in the model.
        """
        runs: dict[str, list[PassRecord]] = {}
        for record in self.passes:
            runs.setdefault(record.pass_name, []).append(record)
        return {name: _in_words(records) for name, records in runs.items()}

    def summaries(self) -> dict[str, str]:
        """What passes say that they did to a step, and how kernels are launched, if they say."""
        found: dict[str, dict[str, None]] = {}
        for record in self.passes:
            if record.summary is not None:
                found.setdefault(record.pass_name, {})[record.summary] = None
        in_words = {name: "; ".join(lines) for name, lines in found.items()}
        return in_words | ({"early_launch": self.early_launch} if self.early_launch else {})

    def finish(self, graph: Graph, name: GraphName) -> None:
        """Note an ATen graph that all passes have seen."""
        self.final_graphs.append((name.text, graph_text(graph)))
        if self.describe is not None:
            made = {**self._made.get("", {}), **self._made.get(name.text, {})}
            self.final_nodes.append(self.describe(graph, made))

    def watch(self, one: Pass, graph: Graph, name: GraphName) -> Callable[..., None]:
        """Look at a graph before a pass.

        Returns a function that records what the pass did. It takes the number of matches, and the
        error if the pass failed.
        """
        before = graph_text(graph) if self.texts else None
        nodes = self.describe(graph, {}) if self.describe else None
        operators = _operators(graph) if self.texts else None

        def note(matches: int, error: Exception | None = None) -> None:
            record = PassRecord(one.name, one.stage, name.text, matches, list(one.skipped))
            record.num_calls, record.looks_for = name.num_calls, one.looks_for
            record.reasons, record.before = list(one.reasons), before
            if error is None:
                record.facts, record.summary = dict(one.facts), one.summary()
                record.after = graph_text(graph) if self.texts else None
                if nodes is not None and self.describe is not None and matches:
                    record.nodes = nodes, self.describe(graph, {})
            else:
                record.error = f"{type(error).__name__}: {error}"
                record.after = _text_of_broken(graph) if self.texts else None
            if operators is not None:
                record.operators = operators, _operators(graph)
            if nodes is not None:
                names = {node["name"] for node in nodes}
                made = self._made.setdefault("" if one.stage == "dynamo" else name.text, {})
                made.update({n.name: one.name for n in graph.nodes if n.name not in names})
            self.passes.append(record)

        return note


def _operators(graph: Graph) -> dict[str, int]:
    """How often each operator is called."""
    called = ("call_function", "call_method", "call_module")
    return dict(
        collections.Counter(
            str(n.target) if n.op == "call_module" else operator_name(n)
            for n in graph.nodes
            if n.op in called
        )
    )


def _in_words(records: list[PassRecord]) -> str:
    """Matches of one pass over some graphs."""
    found: dict[tuple[str, int], int] = {}
    for record in records:
        graph = (record.graph_name, record.num_calls)
        found[graph] = found.get(graph, 0) + record.matches
    matched = {graph: matches for graph, matches in found.items() if matches}
    if not matched:
        reasons = collections.Counter(reason for one in records for reason in one.reasons)
        missing = f"no {records[0].looks_for}"
        return f"0: {reasons.most_common(1)[0][0] if reasons else missing}"
    return ", ".join(
        f"{matches} x {num_calls} layers"
        if num_calls > 1
        else f"{matches} in {name}"
        if len(found) > 1
        else f"{matches}"
        for (name, num_calls), matches in matched.items()
    )


_active: contextvars.ContextVar[tuple[Recorder, ...]] = contextvars.ContextVar(
    "attn_ops_recorders", default=()
)
"""Recorders of open blocks. Global, because torch passes nothing of the caller to a backend."""


@contextlib.contextmanager
def recording(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Record compilations inside the block. Blocks nest; each recorder sees all inside its own."""
    recorder = recorder or Recorder()
    token = _active.set((*_active.get(), recorder))
    loaded = {id(module) for module in PyCodeCache.modules}
    try:
        yield recorder
    finally:
        _active.reset(token)
        new = [m for m in PyCodeCache.modules if id(m) not in loaded and hasattr(m, "call")]
        paths = [Path(m.__file__ or "") for m in new]
        recorder.output_code += [p.read_text() for p in paths if p.is_file()]


def recorders() -> tuple[Recorder, ...]:
    """The active recorders."""
    return _active.get()


def joins_dump(session: Any) -> bool:
    """Whether a dump has begun that has not seen a session's model; from here on it has."""
    unseen = [r for r in _active.get() if r.texts and session not in r.sessions]
    for recorder in unseen:
        recorder.sessions.add(session)
    return bool(unseen)


def _text_of_broken(graph: Graph) -> str:
    """The graph as a failed pass left it, which may be too broken to print."""
    try:
        return graph_text(graph)
    except Exception as error:  # whatever in it is broken
        return f"# it cannot be printed: {type(error).__name__}: {error}"


def graph_text(graph: Graph) -> str:
    """The graph as Python, one node a line, with dtypes and shapes."""
    owner = graph.owning_module
    module = owner
    if not isinstance(module, torch.fx.GraphModule):
        module = torch.fx.GraphModule(owner or torch.nn.Module(), graph)
        graph.owning_module = (
            owner  # making a module of it has changed its owner, to which passes add subgraphs
        )
    code = module.print_readable(print_output=False, include_stride=True)
    return "\n".join(
        line.rstrip() for line in code.splitlines() if not line.strip().startswith("# File:")
    )


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


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _breaks() -> int:
    return sum(counters["graph_break"].values())
