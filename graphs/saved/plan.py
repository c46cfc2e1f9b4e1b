"""The calls of a compiled model as data: inputs by their names, pieces by number, one result.

A plan holds names, numbers and lists only, and is written as JSON.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._dynamo.source import LocalSource
from torch.fx import Node

from fx_passes.kept import CompiledGraph
from graphs.saved.folder import NotSavedError


@dataclasses.dataclass(frozen=True)
class Plan:
    """Values are numbered: inputs first, then the results of the calls, in order.

    Attributes:
        inputs: Dynamo's names of the inputs, `L['self']._parameters['w']`.
        sizes: of each input that is a tensor; None where a size may change, and for other inputs.
        strides: the same.
        guards: what torch asked of the sizes: an expression over the inputs, `L['t0']` and so on.
        calls: piece, values it takes, number of its results.
        result: the value that holds the logits.
    """

    inputs: list[str]
    sizes: list[list[int | None] | None]
    strides: list[list[int | None] | None]
    guards: str
    calls: list[tuple[int, list[int], int]]
    result: int

    @classmethod
    def of(cls, graph: CompiledGraph) -> "Plan":
        """The plan of a graph that was compiled.

        Raises:
            NotSavedError: the graph does something that a plan cannot express.
        """
        if graph.modified:
            raise NotSavedError(f"the model changes {graph.modified[0]} in its forward")
        for source in graph.sources:
            if not source.startswith("L["):
                raise NotSavedError(f"an input of the graph is {source or 'without a name'}")
        nodes = list(graph.gm.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        numbers = {node: i for i, node in enumerate(inputs)}
        (results,) = nodes[-1].args
        if graph.whole:
            calls = [(0, list(range(len(inputs))), len(results))]
            numbers |= {node: len(inputs) + i for i, node in enumerate(results)}
        else:
            calls = _calls(nodes, numbers)
        outputs = [n for n in results if isinstance(n, Node)]
        if len(outputs) != 1:
            raise NotSavedError(f"the graph has {len(outputs)} results, not the logits alone")
        values = [n.meta.get("example_value") for n in inputs]
        sizes, strides = _fixed(values, torch.Tensor.size), _fixed(values, torch.Tensor.stride)
        guards = _guards(values, graph.shape_env)
        return cls(graph.sources, sizes, strides, guards, calls, numbers[outputs[0]])


def _calls(nodes: Sequence[Node], numbers: dict[Node, int]) -> list[tuple[int, list[int], int]]:
    """The calls in order; `numbers` gets their results."""
    calls, next_value = [], len(numbers)
    pieces: dict[Any, int] = {}
    results: dict[Any, int] = {}
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            raise NotSavedError(f"the graph holds a constant, {node.target}")
        if node.target is operator.getitem and node.args[0] in results:
            numbers[node] = results[node.args[0]] + cast(int, node.args[1])
            continue
        if node.kwargs or not all(isinstance(a, Node) for a in node.args):
            raise NotSavedError(f"{node.name} is called with a constant")
        if any(a not in numbers for a in node.args):
            raise NotSavedError(f"{node.name} takes what is no tensor")
        piece = pieces.setdefault(node.target, len(pieces))
        count = len(node.meta["example_value"])
        calls.append((piece, [numbers[cast(Node, a)] for a in node.args], count))
        results[node] = next_value
        next_value += count
    return calls


def _fixed(values: Sequence[Any], read: Any) -> list[list[int | None] | None]:
    return [
        [n if isinstance(n, int) else None for n in read(value)]
        if isinstance(value, torch.Tensor) else None
        for value in values
    ]  # fmt: skip


def _guards(values: Sequence[Any], env: Any) -> str:
    if any(env.deferred_runtime_asserts.values()):
        raise NotSavedError("the graph asserts sizes when it runs")
    sized = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor | torch.SymInt)}
    names = [LocalSource(f"t{i}") for i in sized]
    guards = env.produce_guards(list(sized.values()), names, ignore_static=True)
    return " and ".join(guards or ["True"])
