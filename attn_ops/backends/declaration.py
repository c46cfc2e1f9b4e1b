"""What a third party's `Backend` must hold to be registered."""

import dataclasses
import functools
import inspect
import pickle
from typing import Any

import torch

from attn_ops.backends.base import Backend
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionCGSupport, AttentionMetadataBuilder, Support

_FUNCTIONS = {
    "forward": ("q", "kv_cache", "meta", "options"),
    "unavailable": (),
    "varlen": ("q", "k", "v", "meta", "options"),
    "plan_of": ("meta", "spec"),
}
"""Fields of a backend that are functions, with what they are given."""

_TUPLES = {
    "devices": str,
    "dtypes": torch.dtype,
    "head_sizes": int,
    "block_sizes": int,
    "kv_cache_dtypes": str,
    "output_quant": str,
    "latent_sizes": tuple,
}
"""Fields of a support that are tuples, with what they hold."""


def check_backend(backend: object) -> None:
    """Raise unless it is a backend whose fields are what they should be.

    Raises:
        TypeError: it is no `Backend`, or a field has another type.
        ValueError: a value is not known, or a function cannot be pickled.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a Backend, got {type(backend).__name__}")
    if not isinstance(backend.name, str) or not backend.name.isupper():
        raise ValueError(f"backend.name must be a name in upper case, got {backend.name!r}")
    _check_support(backend.support, backend.name)
    _check_builder(backend)
    for field, given in _FUNCTIONS.items():
        optional = field in ("varlen", "plan_of")
        if not (optional and getattr(backend, field) is None):
            _check_function(backend, field, given)
    for field in ("builder", *_FUNCTIONS):
        _check_pickles(backend, field)


def _check_support(support: object, name: str) -> None:
    if not isinstance(support, Support):
        raise _wrong(name, "support", "a Support", support)
    for field, kind in _TUPLES.items():
        values = getattr(support, field)
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
            raise _wrong(name, f"support.{field}", f"a tuple of {kind.__name__}", values)
        if not values and field in ("devices", "dtypes", "kv_cache_dtypes"):
            raise ValueError(
                f"backend.support.{field} must hold at least one, got none of backend {name}"
            )
    if not isinstance(support.cudagraph, AttentionCGSupport):
        raise _wrong(name, "support.cudagraph", "an AttentionCGSupport", support.cudagraph)
    for field in dataclasses.fields(Support):
        if field.type is bool and not isinstance(getattr(support, field.name), bool):
            raise _wrong(name, f"support.{field.name}", "a bool", getattr(support, field.name))
    unknown = [kind for kind in support.kv_cache_dtypes if kind not in KV_CACHE_DTYPES]
    if unknown:
        raise ValueError(
            f"backend.support.kv_cache_dtypes must be known, got {unknown[0]!r} of backend {name}; "
            f"supported: {', '.join(KV_CACHE_DTYPES)}"
        )


def _check_builder(backend: Backend) -> None:
    builder: Any = backend.builder
    made = builder.func if isinstance(builder, functools.partial) else builder
    if not isinstance(made, type) or not issubclass(made, AttentionMetadataBuilder):
        raise _wrong(backend.name, "builder", "a subclass of AttentionMetadataBuilder", builder)


def _check_function(backend: Backend, field: str, given: tuple[str, ...]) -> None:
    function = getattr(backend, field)
    if field == "forward" and backend.plan_of is not None:
        given = (*given, "plan")
    wanted = f"a function of ({', '.join(given)})"
    if not callable(function):
        raise _wrong(backend.name, field, wanted, function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin, which has none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        got = f"{getattr(function, '__name__', function)}{signature}"
        raise TypeError(
            f"backend.{field} must be {wanted}, got {got} of backend {backend.name}"
        ) from error


def _check_pickles(backend: Backend, field: str) -> None:
    """Raise unless a compiled model's cache key can hold it: it pickles the step's metadata.

    What attn-ops made itself is not asked: masks of `flex_backend` and predicates of
    `grouped_backend` may be closures.
    """
    value = getattr(backend, field)
    made_by = value.func if isinstance(value, functools.partial) else value
    if str(getattr(made_by, "__module__", "")).startswith("attn_ops."):
        return
    try:
        pickle.dumps(value)
    except Exception as error:  # whatever the value's own reduction raises
        raise ValueError(
            f"backend.{field} must be picklable, got "
            f"{getattr(made_by, '__qualname__', repr(made_by))} of backend {backend.name} "
            f"({error}); supported: what is defined at module level; define it there"
        ) from error


def _wrong(name: str, field: str, wanted: str, got: object) -> TypeError:
    return TypeError(f"backend.{field} must be {wanted}, got {got!r} of backend {name}")
