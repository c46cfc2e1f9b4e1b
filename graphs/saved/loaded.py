"""A model whose forward is a plan: what Dynamo would check is checked, then pieces are called."""

import dataclasses
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from graphs.saved.plan import NotSavedError, Plan

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Logits:
    """What a session reads of a model's output."""

    logits: torch.Tensor


class LoadedModel:
    """Called as the compiled model is. Without a gradient, without hooks.

    Args:
        plan: the calls.
        pieces: compiled functions.
        model: whose parameters are inputs, as Transformers made it.
        compiled: is called where the plan does not hold, and from then on.
        inputs: keywords of a call that the plan holds for; constants must stay as they are.

    Attributes:
        refused: why `compiled` is called instead; None: it is not.
    """

    def __init__(
        self,
        plan: Plan,
        pieces: Sequence[Callable[..., Any]],
        model: Any,
        compiled: Callable[..., Any],
        inputs: dict[str, Any],
    ) -> None:
        self._plan, self._compiled = plan, compiled
        self._steps = _steps(plan, pieces)
        self.refused: str | None = None
        self._constants = {k: v for k, v in inputs.items() if _is_constant(v)}
        self._keys = inputs.keys()
        self._held = [i for i, p in enumerate(plan.inputs) if p.root == ""]
        self._given = [i for i, p in enumerate(plan.inputs) if p.root != ""]
        self._holders = [_follow(model, plan.inputs[i].steps[:-1]) for i in self._held]
        self._getters = [_getter(*plan.inputs[i].steps[-1]) for i in self._held]
        self._sizes = _sizes(plan)
        tensors = self._tensors(self._values(inputs))
        dims: Any = [[s if isinstance(s, int) else None for s in plan.shapes[i] or ()]
                for i in self._checked]  # fmt: skip
        strides: Any = [_strides(d, t) for d, t in zip(dims, tensors, strict=True)]
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=dims, dynamic_dims_strides=strides)

    def __call__(self, **inputs: Any) -> Any:
        if self.refused is None:
            try:
                return Logits(self._run(inputs))
            except NotSavedError as error:
                self.refuse(str(error))
        return self._compiled(**inputs)

    def refuse(self, why: str) -> None:
        """From here on the compiled model is called, which Dynamo then traces."""
        self.refused = why
        logger.warning("a saved compilation is used no more: %s", why)

    def _run(self, inputs: dict[str, Any]) -> torch.Tensor:
        values = self._values(inputs)
        self._check(inputs, values)
        for piece, taken, dead in self._steps:
            values += piece(*[values[i] for i in taken])
            for i in dead:
                values[i] = None
        return values[self._plan.result]

    def _values(self, inputs: dict[str, Any]) -> list[Any]:
        values: list[Any] = [None] * len(self._plan.inputs)
        try:
            for i, holder, get in zip(self._held, self._holders, self._getters, strict=True):
                values[i] = get(holder)
            for i in self._given:
                place = self._plan.inputs[i]
                value = _follow(inputs[place.root], place.steps)
                values[i] = value if place.size is None else value.shape[place.size]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise NotSavedError(f"an input of the graph is gone: {error!r}") from error
        return values

    @property
    def _checked(self) -> list[int]:
        return [i for i, shape in enumerate(self._plan.shapes) if shape is not None]

    def _tensors(self, values: list[Any]) -> list[torch.Tensor]:
        return [values[i] for i in self._checked]

    def _check(self, inputs: dict[str, Any], values: list[Any]) -> None:
        """What Dynamo would guard on; the session checks the model's attributes and code."""
        if inputs.keys() != self._keys:
            raise NotSavedError(f"the model is called with {', '.join(inputs)}")
        for name, constant in self._constants.items():
            if type(inputs[name]) is not type(constant) or inputs[name] != constant:
                raise NotSavedError(f"{name} is {inputs[name]!r}, not {constant!r}")
        tensors = self._tensors(values)
        if not self._guards.check(*tensors):
            raise NotSavedError(f"a tensor is another: {self._guards.check_verbose(*tensors)}")
        found = {}
        for name, places in self._sizes.items():
            sizes = {values[i].shape[d] for i, d in places}
            low, high = self._plan.symbols[name]
            if len(sizes) != 1 or not _within(found.setdefault(name, sizes.pop()), low, high):
                raise NotSavedError(f"the size {name} differs between inputs, or is out of range")
        for a, b in self._plan.unequal:
            if found[a] == found[b]:
                raise NotSavedError(f"the sizes {a} and {b} must differ, got {found[a]} twice")


def _within(size: int, low: int | None, high: int | None) -> bool:
    return (low is None or low <= size) and (high is None or size <= high)


def _strides(dims: list[int | None], tensor: torch.Tensor) -> list[int | None]:
    """Those that are checked: of dimensions with no changing size behind them."""
    return [None if None in dims[d + 1 :] else stride for d, stride in enumerate(tensor.stride())]


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _follow(value: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    for kind, name in steps:
        value = _getter(kind, name)(value)
    return value


def _getter(kind: str, name: Any) -> Callable[[Any], Any]:
    return operator.attrgetter(name) if kind == "attr" else operator.itemgetter(name)


def _sizes(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """By symbol, the inputs and dimensions that have it."""
    places: dict[str, list[tuple[int, int]]] = {}
    for i, shape in enumerate(plan.shapes):
        for d, size in enumerate(shape or ()):
            if isinstance(size, str):
                places.setdefault(size, []).append((i, d))
    return places


def _steps(
    plan: Plan, pieces: Sequence[Callable[..., Any]]
) -> list[tuple[Callable[..., Any], list[int], list[int]]]:
    """Piece, values it takes, and values that nothing needs behind it."""
    num_inputs, last = len(plan.inputs), {plan.result: len(plan.calls)}
    made, results = num_inputs, []
    for number, (_, taken, count) in enumerate(plan.calls):
        last |= {v: max(number, last.get(v, 0)) for v in taken}
        results.append(range(made, made + count))
        made += count
    for number, span in enumerate(results):
        for v in span:
            last.setdefault(v, number)
    dead: list[list[int]] = [[] for _ in plan.calls] + [[]]
    for value, number in last.items():
        if value >= num_inputs:  # the session keeps inputs alive
            dead[number].append(value)
    return [
        (pieces[piece], taken, dead[number]) for number, (piece, taken, _) in enumerate(plan.calls)
    ]
