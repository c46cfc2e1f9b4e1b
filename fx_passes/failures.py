"""A pass that fails: the error names the pass, the graph and the node."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch.fx import Node


class PassError(RuntimeError):
    """A pass raised, or returned what it must not. The error itself is in `__cause__`."""


class RefusedError(ValueError):
    """A pass that must not be left out cannot be applied: the user asked for it by an option."""


def refusal(error: BaseException | None) -> RefusedError | None:
    """The refusal that a compiler has wrapped in its own error, if it is one."""
    while error is not None and not isinstance(error, RefusedError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


class named_errors:
    """Let errors inside a block name the pass, its graph, the node that it was at, and dumps.

    A class: a generator's block hides a StopIteration that is raised inside.
    """

    def __init__(
        self, pass_name: str, graph_name: str | None = None, dumps: Sequence[Path] = ()
    ) -> None:
        self.pass_name, self.graph_name, self.dumps = pass_name, graph_name, dumps

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, PassError | RefusedError):
            return
        node = _node_of(error.__traceback__)
        where = f" on the graph {self.graph_name!r}" if self.graph_name else ""
        where += f" at the node {node.name!r}" if node is not None else ""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self.dumps:
            said += f"; the dump in {', '.join(map(str, self.dumps))} has its graph"
        raise PassError(f"the pass {self.pass_name!r} failed{where}: {said}") from error


def _node_of(trace: TracebackType | None) -> Node | None:
    """The node in a variable of the innermost function that has one; `node` before others."""
    found = None
    while trace is not None:
        variables = trace.tb_frame.f_locals
        nodes = [value for value in variables.values() if isinstance(value, Node)]
        named = variables.get("node")
        if nodes:
            found = named if isinstance(named, Node) else nodes[-1]
        trace = trace.tb_next
    return found
