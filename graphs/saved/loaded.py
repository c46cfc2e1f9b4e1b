"""A model whose forward is a plan: first it checks what Dynamo would, then it calls the pieces."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from graphs.saved.folder import NotSavedError
from graphs.saved.plan import Plan

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Logits:
    """What a session reads of a model's output."""

    logits: torch.Tensor


class LoadedModel:
    """Called in the place of the compiled model, without gradients.

    Args:
        plan: the calls.
        pieces: compiled functions.
        model: the uncompiled model, whose parameters are inputs.
        compiled: called instead from the first call on that the plan does not hold for.
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
        inputs: Mapping[str, Any],
    ) -> None:
        self._plan, self._model, self._compiled = plan, model, compiled
        self.refused: str | None = None
        self._constants = {k: v for k, v in inputs.items() if is_constant(v)}
        self._keys = inputs.keys()
        self._steps = [
            (pieces[piece], taken, dead)
            for (piece, taken, _), dead in zip(plan.calls, _dead_values(plan), strict=True)
        ]
        self._sources = compile(f"[{', '.join(plan.inputs)}]", "<inputs>", "eval")
        self._sizes = compile(plan.guards, "<guards>", "eval")
        self._tensors = [i for i, size in enumerate(plan.sizes) if size is not None]
        values = self._values(inputs)
        dims: Any = [plan.sizes[i] for i in self._tensors]
        strides: Any = [plan.strides[i] for i in self._tensors]
        self._guards = TensorGuards(
            *[values[i] for i in self._tensors],
            dynamic_dims_sizes=dims, dynamic_dims_strides=strides,
        )  # fmt: skip

    def __call__(self, **inputs: Any) -> Any:
        if self.refused is None:
            try:
                return Logits(self._run(inputs))
            except NotSavedError as error:
                self.refused = str(error)
                logger.warning("a saved compilation is used no more: %s", error)
        return self._compiled(**inputs)

    def _run(self, inputs: dict[str, Any]) -> torch.Tensor:
        values = self._values(inputs)
        self._check(inputs, values)
        for piece, taken, dead in self._steps:
            values += piece(*[values[i] for i in taken])
            for i in dead:
                values[i] = None
        return values[self._plan.result]

    def _values(self, inputs: Mapping[str, Any]) -> list[Any]:
        """The inputs of the graph: Dynamo's names are expressions over the locals of forward.

        Or of a decorator around it, which takes `*args` and `**kwargs`.
        """
        scope = {**inputs, "self": self._model, "args": (self._model,), "kwargs": inputs}
        try:
            return eval(self._sources, {"L": scope})
        except (AttributeError, LookupError, NameError, TypeError) as error:
            raise NotSavedError(f"an input of the graph is gone: {error!r}") from error

    def _check(self, inputs: dict[str, Any], values: list[Any]) -> None:
        """Check what Dynamo guards on in the inputs; the key has the model and its code."""
        if inputs.keys() != self._keys:
            raise NotSavedError(f"the model is called with {', '.join(inputs)}")
        for name, constant in self._constants.items():
            if type(inputs[name]) is not type(constant) or inputs[name] != constant:
                raise NotSavedError(f"{name} is {inputs[name]!r}, not {constant!r}")
        tensors = [values[i] for i in self._tensors]
        if not self._guards.check(*tensors):
            names = [self._plan.inputs[i] for i in self._tensors]
            why = self._guards.check_verbose(*tensors, tensor_check_names=names)
            raise NotSavedError(f"an input is another: {why}")
        if not eval(self._sizes, SYMPY_INTERP, {"L": {f"t{i}": v for i, v in enumerate(values)}}):
            raise NotSavedError("sizes of the inputs are others than those it was compiled for")


def is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _dead_values(plan: Plan) -> list[list[int]]:
    """For each call, results of earlier calls that no later one takes."""
    last = {v: number for number, (_, taken, _) in enumerate(plan.calls) for v in taken}
    dead: list[list[int]] = [[] for _ in plan.calls]
    for value, number in last.items():
        if value >= len(plan.inputs) and value != plan.result:  # the session keeps inputs alive
            dead[number].append(value)
    return dead
