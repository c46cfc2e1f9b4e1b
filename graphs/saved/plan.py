"""The calls of a compiled model as data: inputs by their place, pieces by number, one result.

A plan holds names, numbers and lists only, and is written as JSON.
"""

import ast
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.solve import try_solve
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from fx_passes.kept import CompiledGraph

Step = tuple[str, Any]
"""`attr` and a name, or `item` and a key."""


class NotSavedError(Exception):
    """Why something cannot be written, or not be used, in a line for reports."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an input of the graph is found.

    Attributes:
        root: a keyword of the call, or "" for the model.
        steps: attributes and items from there.
        size: the dimension whose size it is; None: the object itself.
    """

    root: str
    steps: tuple[Step, ...]
    size: int | None = None

    @classmethod
    def parse(cls, source: str) -> "Place":
        """From Dynamo's name of the input, `L['kwargs']['input_ids'].size()[1]`."""
        size, steps = None, []
        try:
            node: Any = ast.parse(source, mode="eval").body
        except SyntaxError:
            raise NotSavedError(f"an input of the graph is {source!r}") from None
        if _is_size(node):
            size, node = _constant(node), node.value.func.value
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                steps.append(("attr", node.attr))
            elif isinstance(node, ast.Subscript) and isinstance(_constant(node), str | int):
                steps.append(("item", _constant(node)))
            else:
                raise NotSavedError(f"an input of the graph is {source}")
            node = node.value
        steps.reverse()
        if node.id == "L" and steps and steps[0][0] == "item":
            _, root = steps.pop(0)
            if root == "kwargs" and steps and steps[0][0] == "item":
                _, root = steps.pop(0)
            if root != "args":
                return cls("" if root == "self" else str(root), tuple(steps), size)
        raise NotSavedError(f"an input of the graph is {source}")


def _constant(node: Any) -> Any:
    try:
        return ast.literal_eval(node.slice)
    except ValueError:
        return None


def _is_size(node: Any) -> bool:
    """Whether it is `x.size()[i]`."""
    called = node.value if isinstance(node, ast.Subscript) else None
    function = called.func if isinstance(called, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "size"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Values are numbered: inputs first, then the results of the calls, in order.

    Attributes:
        inputs: where each is found.
        shapes: of each, ints and names of symbols; None of what is no tensor.
        symbols: the least and greatest value of each; None: no bound.
        unequal: pairs of symbols whose values differ.
        calls: piece, values it takes, results it has.
        result: the value that holds the logits.
    """

    inputs: list[Place]
    shapes: list[list[int | str] | None]
    symbols: dict[str, tuple[int | None, int | None]]
    unequal: list[list[str]]
    calls: list[tuple[int, list[int], int]]
    result: int

    @classmethod
    def of(cls, graph: CompiledGraph) -> "Plan":
        """The plan of a graph that was compiled.

        Raises:
            NotSavedError: it does something that a plan has no words for.
        """
        if graph.modified:
            raise NotSavedError(f"the model changes {graph.modified[0]} in its forward")
        nodes = list(graph.gm.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        numbers = {node: i for i, node in enumerate(inputs)}
        pieces: dict[Any, int] = {}
        calls = []
        if graph.whole:
            (results,) = nodes[-1].args
            calls.append((0, list(range(len(inputs))), len(results)))
            numbers |= {node: len(inputs) + i for i, node in enumerate(results)}
        else:
            calls = _calls(nodes, numbers, pieces)
        (results,) = nodes[-1].args
        outputs = [n for n in results if isinstance(n, Node)]
        if len(outputs) != 1:
            raise NotSavedError(f"the graph has {len(outputs)} results, not the logits alone")
        shapes = [_shape(n, graph.shape_env) for n in inputs]
        return cls(
            [Place.parse(source) for source in graph.sources],
            shapes,
            *_symbols(shapes, graph.shape_env),
            calls,
            numbers[outputs[0]],
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "Plan":
        """Raises NotSavedError for what `to_json` has not written."""
        try:
            places = [
                Place(p["root"], tuple((k, v) for k, v in p["steps"]), p["size"])
                for p in data["inputs"]
            ]
            if any(k not in ("attr", "item") for p in places for k, _ in p.steps):
                raise ValueError("unknown step")
            symbols = {name: (low, high) for name, (low, high) in data["symbols"].items()}
            calls = [(int(p), [int(v) for v in taken], int(n)) for p, taken, n in data["calls"]]
            unequal = [[str(name) for name in pair] for pair in data["unequal"]]
            if not symbols.keys() >= {name for pair in unequal for name in pair}:
                raise ValueError("unknown symbol")
            return cls(places, data["shapes"], symbols, unequal, calls, int(data["result"]))
        except (KeyError, TypeError, ValueError) as error:
            raise NotSavedError(f"the file holds no plan: {error!r}") from error


def _calls(
    nodes: Sequence[Node], numbers: dict[Node, int], pieces: dict[Any, int]
) -> list[tuple[int, list[int], int]]:
    """The calls in order; `numbers` gets their results."""
    calls, first = [], len(numbers)
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
        results[node] = first
        first += count
    return calls


def _shape(node: Node, env: Any) -> list[int | str] | None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    shape = []
    for size in value.shape:
        if isinstance(size, int):
            shape.append(size)
            continue
        expr = env.simplify(size.node.expr)
        if not expr.is_Symbol:
            raise NotSavedError(f"{node.name} has the size {expr}")
        shape.append(str(expr))
    return shape


def _symbols(
    shapes: Sequence[Sequence[int | str] | None], env: Any
) -> tuple[dict[str, tuple[int | None, int | None]], list[list[str]]]:
    """Bounds of the symbols, and pairs that differ; what else sizes must meet is refused."""
    ranges, unequal = dict(env.var_to_range), []
    for guard in env.guards:
        _tighten(ranges, guard.expr)
    for guard in env.guards:
        if not _is_known(guard.expr, ranges, env):
            unequal.append(_unequal(guard.expr))
    if any(env.deferred_runtime_asserts.values()):
        raise NotSavedError("the graph asserts sizes when it runs")
    wanted = {s for shape in shapes for s in shape or () if isinstance(s, str)}
    named = {str(s): (_bound(r.lower), _bound(r.upper)) for s, r in ranges.items()}
    return {name: named[name] for name in wanted}, unequal


def _tighten(ranges: dict[Any, Any], expr: Any) -> None:
    """Let a range say what a condition on one symbol does, such as 32768 * s <= 2147483647."""
    if len(expr.free_symbols) != 1 or not expr.is_Relational:
        return
    (symbol,) = expr.free_symbols
    solved = try_solve(expr, symbol)
    if symbol not in ranges or solved is None or not solved[1].is_number:
        return
    low, high = sympy.floor(solved[1]), sympy.ceiling(solved[1])
    allowed = {"<=": (-int_oo, low), "<": (-int_oo, high - 1), ">=": (high, int_oo),
               ">": (low + 1, int_oo)}  # fmt: skip
    bounds = allowed.get(solved[0].rel_op, (-int_oo, int_oo))
    ranges[symbol] = ranges[symbol] & ValueRanges(*bounds)


def _is_known(expr: Any, ranges: dict[Any, Any], env: Any) -> bool:
    """Whether it holds for all sizes in the ranges, where one symbol stands for equal ones."""
    expr = env.simplify(expr)
    if expr == sympy.true or not expr.is_Relational:
        return expr == sympy.true
    difference = bound_sympy(env.simplify(expr.lhs - expr.rhs), ranges)
    low, high = difference.lower, difference.upper
    known = {"==": low == high == 0, "<=": high <= 0, ">=": low >= 0, "<": high < 0, ">": low > 0}
    return bool(known.get(expr.rel_op, False))


def _unequal(expr: Any) -> list[str]:
    """Two symbols of which it says that they differ."""
    sides = [expr.lhs, expr.rhs] if expr.is_Relational and expr.rel_op == "!=" else []
    if not sides or not all(side.is_Symbol for side in sides):
        raise NotSavedError(f"the graph is for sizes with {expr} only")
    return [str(side) for side in sides]


def _bound(value: Any) -> int | None:
    return int(value) if value.is_Integer else None
