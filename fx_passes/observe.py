"""What the passes did: a record per compilation, for reports and dumps, kept only if asked for."""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache


@dataclasses.dataclass
class PassRecord:
    """One run of one pass over one graph."""

    pass_name: str
    stage: str
    graph_name: str  # "main" or the subgraph's name
    matches: int
    skipped: list[str]
    before: str | None = None  # FX text, if the recorder wants texts
    after: str | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    pictures: tuple[str, str] | None = None  # Mermaid, before and after, of a changed Dynamo graph


@dataclasses.dataclass
class Recorder:
    """Collects what happens while it is active.

    Attributes:
        texts: whether graphs are printed before and after each pass.
        passes: runs, in order.
        num_graphs: graphs that Dynamo handed to the backend.
        final_graphs: the ATen graphs as Inductor gets them, by name.
        output_code: sources that Inductor wrote, or took from its cache, in order of compilation.
        sessions: the decode sessions that compiled their model while this was active.
    """

    texts: bool = False
    passes: list[PassRecord] = dataclasses.field(default_factory=list)
    num_graphs: int = 0
    final_graphs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    output_code: list[str] = dataclasses.field(default_factory=list)
    sessions: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)

    def matches(self) -> dict[str, int]:
        """Matches of each pass that ran, over all graphs."""
        total: dict[str, int] = {}
        for record in self.passes:
            total[record.pass_name] = total.get(record.pass_name, 0) + record.matches
        return total


def fast_prefill_line(passes: Sequence[PassRecord]) -> str | None:
    """What the pass fast_prefill does to a step, or why nothing; None: it is switched off."""
    records = [record for record in passes if record.pass_name == "fast_prefill"]
    return "; ".join(dict.fromkeys(_saved(record) for record in records)) or None


def _saved(record: PassRecord) -> str:
    f = record.facts
    if not f:
        return f"nothing is dropped: {'; '.join(record.skipped) or 'the graph is reduced already'}"
    return (
        f"computes {f['num_products']} of {f['of_products']} products and {f['num_attentions']} of "
        f"{f['of_attentions']} attentions for logits rows only; saves {f['flops_per_row']:,} FLOP "
        f"and {f['bytes_per_row']:,} bytes a dead row"
    )


_active: contextvars.ContextVar[tuple[Recorder, ...]] = contextvars.ContextVar(
    "attn_ops_recorders", default=()
)


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
    return _active.get()


def wants_texts() -> bool:
    return any(r.texts for r in _active.get())


def graph_text(graph: torch.fx.Graph) -> str:
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
