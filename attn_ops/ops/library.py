"""The operator library `attn_ops`, defined once.

Each operator's schema, implementation and fake stand together in its own file. `Library.define`
with `impl` costs about 5 us less per call than `torch.library.custom_op`.

No operator computes gradients. Backward raises, as else it would give none, or zeros.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

LIBRARY = torch.library.Library("attn_ops", "DEF")
"""Global: torch forgets the operators of a library that nothing holds."""

Implementation = TypeVar("Implementation", bound=Callable[..., Any])


def implements(name: str) -> Callable[[Implementation], Implementation]:
    """Register a function as the implementation of the operator `name`, on all devices."""

    def register(function: Implementation) -> Implementation:
        operator = getattr(torch.ops.attn_ops, name).default

        @functools.wraps(function)
        def implementation(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and _inputs_with_gradients(args, kwargs):
                return _without_backward(operator, function, torch.no_grad(), args, kwargs)
            return function(*args, **kwargs)

        def traced(*args: Any, **kwargs: Any) -> Any:
            below = torch._C._AutoDispatchBelowAutograd()
            return _without_backward(operator, operator, below, args, kwargs)

        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        # AOTAutograd traces gradients by torch's Python dispatcher, which calls this one. A call
        # that is not traced never meets it: an autograd kernel in Python would cost it 5 us.
        operator.py_impl(torch._C.DispatchKey.Autograd)(traced)
        return function

    return register


# -- gradients -------------------------------------------------------------------------------------


def _without_backward(
    operator: torch._ops.OpOverload,
    function: Callable[..., Any],
    guard: contextlib.AbstractContextManager[None],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call `function`. If an input requires grad, backward of what it returns or writes raises."""
    with guard:
        results = function(*args, **kwargs)
    inputs = _inputs_with_gradients(args, kwargs)
    if not inputs or not torch.is_grad_enabled():
        return results
    arguments = operator._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    written = _tensors(given.get(a.name) for a in arguments if a.is_write)
    # Detached: autograd refuses to touch a view that was made under no_grad.
    returned = [x.detach() for x in _tensors([results])]
    for x in (*returned, *written):
        if x.is_floating_point():
            _NoBackward.apply(x, operator._opname, *inputs)
    return tuple(returned) if isinstance(results, tuple) else (*returned, None)[0]


def _inputs_with_gradients(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [x for x in _tensors((*args, *kwargs.values())) if x.requires_grad]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


class _NoBackward(torch.autograd.Function):
    """Leaves a tensor as it is, but for its backward: that raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operator: str, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.operator, ctx.inputs = operator, [(i.shape, i.dtype, i.device) for i in inputs]
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # By an operator: a graph with gradients is compiled, and raises if backward ever runs.
        none = torch.ops.attn_ops.no_backward(grads[0], ctx.operator)
        given = [none.to(device, dtype).expand(shape) for shape, dtype, device in ctx.inputs]
        return None, None, *given


LIBRARY.define("no_backward(Tensor grad, str operator) -> Tensor")


@torch.library.impl(LIBRARY, "no_backward", "CompositeExplicitAutograd")
def _no_backward(grad: torch.Tensor, operator: str) -> torch.Tensor:
    raise NotImplementedError(
        f"attn_ops::{operator} must not be differentiated, as it computes no gradients; supported: "
        'torch.no_grad() around it, and for training attn_implementation="sdpa" or attention of '
        "your own"
    )


@torch.library.register_fake("attn_ops::no_backward", lib=LIBRARY)
def _no_backward_fake(grad: torch.Tensor, operator: str) -> torch.Tensor:
    return grad.new_empty(())
