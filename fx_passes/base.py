"""What a pass is: one class that declares what it needs, and rewrites a graph.

The pipeline, the recorders and the reports read the declaration; none of them knows a pass by name.
"""

import abc
import inspect
from typing import Any, ClassVar, Literal, get_args

from torch.fx import Graph

from fx_passes.analysis.training import why_trained
from fx_passes.config import PassConfig
from fx_passes.token_counts import why_outside

Stage = Literal["dynamo", "aten"]
"""`dynamo`: the graph as Dynamo traced it, with mutation. `aten`: the functional ATen graph."""


class Pass(abc.ABC):
    """One rewrite. Its docstring holds `Before::` and `After::` graphs and a "Skipped when" list.

    A pass declares `name`, `stage` and, where it needs it, `needs_inference`, `looks_for`,
    `runs_before`, `runs_after`, `switch`, `token_range`, `of`, `settings`, `summary` and `refuse`.

    Attributes:
        name: what reports, dumps and `register_pass(before=, after=)` call it.
        stage: the graph it works on.
        needs_inference: whether it leaves graphs alone that are trained.
        looks_for: what it rewrites, as reports name it where there is none: "no equal products".
        switch: the field of `PassConfig` that turns it off; None: that of its name. A pass without
            such a field is always on.
        runs_before, runs_after: the pass that it stands beside, unless `register_pass` is told.
        token_range: the numbers of tokens of a batch for which it may rewrite; None: all. A graph
            that may be called with others is left alone. `of` may set it from the options.
        skipped: what the last run did not rewrite, and why, in lines.
        reasons: the same without places, so that equal reasons can be counted.
        facts: numbers of the last run, by name, for reports.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    needs_inference: ClassVar[bool] = False
    looks_for: ClassVar[str] = "place for it"
    runs_before: ClassVar[str | None] = None
    runs_after: ClassVar[str | None] = None
    switch: ClassVar[str | None] = None
    token_range: range | None = None

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.reasons: list[str] = []
        self.facts: dict[str, Any] = {}

    @classmethod
    def of(cls, config: PassConfig) -> "Pass":
        """The pass as the configuration wants it."""
        return cls()

    def run(self, graph: Graph) -> int:
        """Rewrite `graph` in place; the number of matches. The pipeline runs subgraphs itself.

        A graph that has changed has matches: one at least, whatever `apply` counted.

        Raises:
            TypeError: `apply` returns no int.
            ValueError: it returns less than 0.
        """
        self.skipped, self.reasons, self.facts = [], [], {}
        if self.needs_inference and (reason := why_trained(graph, self.stage)):
            self.refuse(reason)
            return 0
        if self.token_range is not None and (reason := why_outside(graph, self.token_range)):
            self.refuse(reason)
            return 0
        before = _shape_of(graph)
        matches = self.apply(graph)
        if type(matches) is not int:
            raise TypeError(f"apply must return its number of matches, an int, got {matches!r}")
        if matches < 0:
            raise ValueError(f"apply must return at least 0 matches, got {matches}")
        matches = matches or int(not _is_same(before, _shape_of(graph)))
        if matches and self.stage == "aten":  # the Dynamo graph's in-place calls look dead to FX
            graph.eliminate_dead_code()
        if matches:
            graph.lint()
        return matches

    @abc.abstractmethod
    def apply(self, graph: Graph) -> int:
        """The rewrite itself. Run again on its own result, it must change nothing and return 0."""

    def skip(self, reason: str, where: str | None = None) -> None:
        """Note why something was not rewritten; `where` names the place, a node or a layer."""
        self.skipped.append(reason if where is None else f"{where}: {reason}")
        self.reasons.append(reason)

    def refuse(self, reason: str) -> None:
        """Note why the whole graph is left alone.

        A pass that must not be left out raises `RefusedError`.
        """
        self.skip(reason)

    def summary(self) -> str | None:
        """What the last run did to a step, in a line for reports; None: nothing worth a line."""
        return None

    def settings(self) -> dict[str, object]:
        """What its behaviour depends on besides its source; part of the compile cache's key."""
        return {}

    def source(self) -> str:
        """Source of the pass's module; part of the compile cache's key."""
        module = inspect.getmodule(type(self))
        try:
            return inspect.getsource(module or type(self))
        except (OSError, TypeError):  # defined at a prompt
            return f"{type(self).__module__}.{type(self).__qualname__}"


def check_pass(new: Any) -> None:
    """Refuse a class that is no pass or cannot be named, placed or limited as it declares.

    Raises:
        TypeError: it is no class of `Pass`, or is abstract.
        ValueError: its name, its stage or its token range cannot be used.
    """
    if not isinstance(new, type) or not issubclass(new, Pass):
        raise TypeError(f"pass must be a subclass of fx_passes.Pass, got {new!r}")
    if missing := sorted(new.__abstractmethods__):
        raise TypeError(f"pass must define {', '.join(missing)}, got {new!r} without")
    name, stage = getattr(new, "name", None), getattr(new, "stage", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"name of a pass must be an identifier, as my_pass, got {name!r} in {new!r}"
        )
    if stage not in get_args(Stage):
        raise ValueError(
            f"stage of the pass {name!r} must be known, got {stage!r}; "
            f"supported: {', '.join(get_args(Stage))}"
        )
    counts = new.token_range
    if counts is not None and (not isinstance(counts, range) or counts.step != 1 or not counts):
        raise ValueError(
            f"token_range of the pass {name!r} must be range(least, most + 1), got {counts!r}"
        )


def _shape_of(graph: Graph) -> list[tuple[Any, ...]]:
    """Nodes in order, with what they call and their arguments, as they are now."""
    return [(n, n.op, n.target, n.args, n.kwargs) for n in graph.nodes]


def _is_same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    """Whether nothing was added, removed, moved or given other arguments.

    Arguments are compared as text only where they were assigned: sizes may be symbols.
    """
    if len(before) != len(after):
        return False
    for old, new in zip(before, after, strict=True):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            if a is not b and (i == 0 or str(a) != str(b)):
                return False
    return True
