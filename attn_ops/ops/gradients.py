"""Backward of operators: it raises, as none of them computes gradients."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("attn_ops", "DEF")
"""Global: torch forgets the operators of a library that nothing holds."""


def without_backward(
    operator: torch._ops.OpOverload,
    function: Callable[..., Any],
    guard: contextlib.AbstractContextManager[None],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call `function`. If an input requires grad, backward of what it returns or writes raises."""
    arguments = operator._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    written = list(_tensors(given.get(a.name) for a in arguments if a.is_write))
    inputs = inputs_with_gradients(args, kwargs) if torch.is_grad_enabled() else []
    if inputs and not all(x.is_floating_point() for x in written):
        refuse_gradients(operator._opname)
    with guard:
        results = function(*args, **kwargs)
    if not inputs:
        return results
    # Detached: autograd refuses to touch a view that was made under no_grad.
    returned = [x.detach() for x in _tensors([results])]
    for x in returned:
        if x.is_floating_point():
            _NoBackward.apply(x, operator._opname, *inputs)
    others = [x for x in inputs if not any(x is one for one in written)]
    for x in map(_owner, written):
        if isinstance(x.grad_fn, _NoBackward._backward_cls):
            if not others:
                continue
            x.detach_()  # else each step's history would hold that of the step before
        _NoBackward.apply(x, operator._opname, *others)
    return tuple(returned) if isinstance(results, tuple) else (*returned, None)[0]


def _owner(x: torch.Tensor) -> torch.Tensor:
    """The tensor that x is a view of, or x: a view's history is that of its owner."""
    return x if x._base is None else x._base


def inputs_with_gradients(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [x for x in _tensors((*args, *kwargs.values())) if x.requires_grad]


def has_tangents(args: tuple, kwargs: dict[str, Any]) -> bool:
    tensors = _tensors((*args, *kwargs.values()))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


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
        ctx.operator, ctx.inputs = operator, [(i.shape, i.dtype, i.device) for i in (x, *inputs)]
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # By an operator: a graph with gradients is compiled, and raises if backward ever runs.
        none = torch.ops.attn_ops.no_backward(grads[0], ctx.operator)
        own, *given = [none.to(device, dtype).expand(shape) for shape, dtype, device in ctx.inputs]
        return own, None, *given


LIBRARY.define("no_backward(Tensor grad, str operator) -> Tensor")


@torch.library.impl(LIBRARY, "no_backward", "CompositeExplicitAutograd")
def _no_backward(grad: torch.Tensor, operator: str) -> torch.Tensor:
    refuse_gradients(operator)


def refuse_gradients(operator: str) -> NoReturn:
    """Raise the error that names the ways out."""
    raise NotImplementedError(
        f"attn_ops::{operator} must not be differentiated, as it computes no gradients; supported: "
        "torch.no_grad() around it, without torch.func and dual tensors, and for training "
        'attn_implementation="sdpa" or attention of your own'
    )


@torch.library.register_fake("attn_ops::no_backward", lib=LIBRARY)
def _no_backward_fake(grad: torch.Tensor, operator: str) -> torch.Tensor:
    return grad.new_empty(())
