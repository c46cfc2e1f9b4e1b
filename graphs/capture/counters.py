"""What Dynamo compiled while a session worked."""

import contextlib
from collections.abc import Iterator

from torch._dynamo.utils import counters


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
