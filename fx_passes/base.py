"""What a pass is: one class that declares what it needs, and rewrites a graph.

The pipeline, the recorders and the reports read the declaration; none of them knows a pass by name.
"""

import abc
import inspect
from typing import Any, ClassVar, Literal

from torch.fx import Graph

from fx_passes.analysis.training import why_trained
from fx_passes.config import PassConfig

Stage = Literal["dynamo", "aten"]
"""`dynamo`: the graph as Dynamo traced it, with mutation. `aten`: the functional ATen graph."""


class Pass(abc.ABC):
    """One rewrite. Its docstring holds `Before::` and `After::` graphs and a "Skipped when" list.

    A pass declares `name`, `stage` and, where it needs it, `needs_inference`, `of`, `settings`,
    `summary` and `refuse`. A switch is a field of `PassConfig` with its name; a pass without one
    is always on.

    Attributes:
        name: what reports, dumps and `register_pass(before=, after=)` call it.
        stage: the graph it works on.
        needs_inference: whether it leaves graphs alone that are trained.
        skipped: reasons of the last run for what was not rewritten.
        facts: numbers of the last run, by name, for reports.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    needs_inference: ClassVar[bool] = False

    def __init__(self) -> None:
        self.skipped: list[str] = []
        self.facts: dict[str, Any] = {}

    @classmethod
    def of(cls, config: PassConfig) -> "Pass":
        """The pass as the configuration wants it."""
        return cls()

    def run(self, graph: Graph) -> int:
        """Rewrite `graph` in place; the number of matches. The pipeline runs subgraphs itself."""
        self.skipped, self.facts = [], {}
        if self.needs_inference and (reason := why_trained(graph, self.stage)):
            self.refuse(reason)
            return 0
        matches = self.apply(graph)
        if matches and self.stage == "aten":  # the Dynamo graph's in-place calls look dead to FX
            graph.eliminate_dead_code()
        if matches:
            graph.lint()
        return matches

    @abc.abstractmethod
    def apply(self, graph: Graph) -> int:
        """The rewrite itself. Run again on its own result, it must change nothing and return 0."""

    def skip(self, reason: str) -> None:
        """Note why something was not rewritten."""
        self.skipped.append(reason)

    def refuse(self, reason: str) -> None:
        """Note why the whole graph is left alone. A pass that must not be left out may raise."""
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
