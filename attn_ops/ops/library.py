"""The operator library `attn_ops`: `operator` makes an operator of an annotated function.

    @operator(mutates=("out",))
    def scale_into(x: torch.Tensor, out: torch.Tensor, *, factor: float = 1.0) -> None:
        out.copy_(x * factor)

defines `attn_ops::scale_into(Tensor x, Tensor(a!) out, *, float factor=1.0) -> ()`; the name
`scale_into` then calls it. `Library.define` with `impl` costs about 5 us less per call than
`torch.library.custom_op`.

No operator computes gradients. Backward raises; otherwise gradients would be missing or zero. What
has no backward that could raise is refused when it is called: transforms of `torch.func`, dual
tensors, and writes to caches of integers.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch.autograd import forward_ad

from attn_ops.metadata import METADATA_TYPE, AttentionMetadata
from attn_ops.ops.gradients import (
    LIBRARY,
    has_tangents,
    inputs_with_gradients,
    refuse_gradients,
    without_backward,
)

Implementation = TypeVar("Implementation", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def operator(
    *,
    fake: Callable[..., Any] = lambda *args, **kwargs: None,
    mutates: Sequence[str] = (),
    keywords: str = "",
    check: Callable[..., None] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Define an operator by a function: schema, implementation on all devices and Python wrapper.

    Args:
        fake: takes the same arguments and returns tensors without values, as the compiler asks.
        mutates: the tensors that the function writes.
        keywords: schema of what the function takes as `**`.
        check: called with the arguments before the operator, by the wrapper alone: compiled code
            calls the operator, and was checked when it was traced.
        tags: of the operator.

    Returns:
        A decorator. The operator has the function's name, without a leading underscore. The wrapper
        passes on what it is given: each keyword costs the dispatcher some tenths of a microsecond.
    """

    def define(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name = function.__name__.removeprefix("_")
        LIBRARY.define(name + schema_of(function, mutates, keywords), tags=tuple(tags))
        implements(name)(function)
        torch.library.register_fake(f"attn_ops::{name}", fake, lib=LIBRARY)
        defined = getattr(torch.ops.attn_ops, name).default

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if check is not None:
                check(*args, **kwargs)
            return defined(*args, **kwargs)

        return call

    return define


_TYPES = {
    torch.Tensor: "Tensor",
    Sequence[torch.Tensor]: "Tensor[]",
    AttentionMetadata: METADATA_TYPE,
    int: "int",
    int | torch.SymInt: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.device: "Device",
    torch.dtype: "ScalarType",
    tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)",
    type(None): "()",
}
"""Types of a schema by annotation; `X | None` is "X?"."""


def schema_of(function: Callable[..., Any], mutates: Sequence[str] = (), keywords: str = "") -> str:
    """The schema that a function's annotations say, without a name.

    >>> def f(x: torch.Tensor, *, n: int | None = None) -> None: ...
    >>> schema_of(f, mutates=("x",))
    '(Tensor(a!) x, *, int? n=None) -> ()'
    """
    hints, aliases, schema = get_type_hints(function), iter("abcdefgh"), []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) and "*" not in schema:
            schema.append("*")
        if parameter.kind is parameter.VAR_KEYWORD:
            schema.append(keywords)
            continue
        kind = _type_of(hints[name])
        if name in mutates:
            kind = kind.replace("Tensor", f"Tensor({next(aliases)}!)")
        has_default = parameter.default is not parameter.empty
        schema.append(f"{kind} {name}={parameter.default!r}" if has_default else f"{kind} {name}")
    return f"({', '.join(schema)}) -> {_TYPES[hints['return']]}"


def _type_of(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    (one,) = (x for x in get_args(annotation) if x is not type(None))
    return f"{_TYPES[one]}?"


def implements(name: str) -> Callable[[Implementation], Implementation]:
    """Register a function as the implementation of the operator `name`, on all devices."""

    def register(function: Implementation) -> Implementation:
        operator = getattr(torch.ops.attn_ops, name).default

        @functools.wraps(function)
        def implementation(*args: Any, **kwargs: Any) -> Any:
            if forward_ad._current_level >= 0 and has_tangents(args, kwargs):
                refuse_gradients(name)
            if torch.is_grad_enabled() and inputs_with_gradients(args, kwargs):
                return without_backward(operator, function, torch.no_grad(), args, kwargs)
            return function(*args, **kwargs)

        def traced(*args: Any, **kwargs: Any) -> Any:
            below = torch._C._AutoDispatchBelowAutograd()
            return without_backward(operator, operator, below, args, kwargs)

        def transformed(*args: Any, **kwargs: Any) -> NoReturn:
            refuse_gradients(name)

        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        # functorch asks this key before it unwraps tensors, and only inside its transforms.
        LIBRARY.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
        # AOTAutograd traces gradients by torch's Python dispatcher, which calls this one. A call
        # that is not traced never meets it: an autograd kernel in Python would cost it 5 us.
        operator.py_impl(torch._C.DispatchKey.Autograd)(traced)
        return function

    return register
