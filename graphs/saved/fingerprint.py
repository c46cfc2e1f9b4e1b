"""Python values as text that is equal in two processes if and only if they mean the same.

Functions are described by their bytecode, so that a replaced one shows.
"""

import collections
import enum
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from graphs.saved.plan import NotSavedError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo)
_DEEPEST = {False: 12, True: 60}
"""Levels that are described, of what may be vague and of what may not (modules in modules)."""

_IGNORED = frozenset(("generation_config", "_name_or_path", "_commit_hash"))
"""Attributes that no forward reads; the first holds a hash of the process."""


class Describer:
    """Describes values; each object once, later by its number.

    Args:
        strict: refuse what cannot be described; else its type stands for it.

    Attributes:
        modules: Python modules that were met.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is not given to another object meanwhile
        self.modules: list[types.ModuleType] = []

    def text(self, value: Any, depth: int = 0) -> str:
        """The description; no object's address is in it."""
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))}.{value.name}"
        if type(value) in _PLAIN or isinstance(value, _OF_TORCH):
            return f"{type(value).__name__} {value!r}"
        if type(value) is tuple:  # whether equal constants are one object is up to Python
            return f"({', '.join(self.text(v, depth + 1) for v in value)})"
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if depth > _DEEPEST[self._strict]:
            return self._unknown(value)
        return self._composed(value, depth + 1)

    def _composed(self, value: Any, depth: int) -> str:
        if isinstance(value, np.generic):
            return f"{_name(type(value))} {value!r}"
        if isinstance(value, torch.Tensor):
            return f"tensor {tuple(value.shape)} {value.dtype} {value.device}"
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, type):
            return f"class {_name(value)}"
        if isinstance(value, types.ModuleType):
            self.modules.append(value)
            return f"module {value.__name__}"
        if isinstance(value, nn.Module):
            return f"{_name(type(value))} {self._all(_attributes(value), depth)}"
        if isinstance(value, Mapping):
            return f"{_name(type(value))} {self._all(list(value.items()), depth)}"
        if isinstance(value, list | tuple | collections.deque):
            return f"{_name(type(value))} [{', '.join(self.text(v, depth) for v in value)}]"
        if isinstance(value, set | frozenset):
            return f"{_name(type(value))} {sorted(self.text(v, depth) for v in value)}"
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> str:
        if isinstance(value, functools.partial):
            return f"partial {self.text([value.func, value.args, value.keywords], depth)}"
        if isinstance(value, types.MethodType):
            return f"method {self.text([value.__func__, value.__self__], depth)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self.text(value.__func__, depth)}"
        if isinstance(value, property):
            return f"property {self.text([value.fget, value.fset], depth)}"
        if hasattr(value, "__wrapped__"):
            return f"{_name(type(value))} {self.text(value.__wrapped__, depth)}"
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
            return f"built-in {value.__qualname__}"
        if isinstance(value, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            return f"operator {value}"
        if self._strict and type(value).__module__ != "builtins":
            held = _held(value)
            if held is not None:
                return f"{_name(type(value))} {self._all(held, depth)}"
        return self._unknown(value)

    def _function(self, value: types.FunctionType, depth: int) -> str:
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.text(cell.cell_contents, depth))
            except ValueError:  # empty
                cells.append("empty")
        rest = self.text([value.__defaults__, value.__kwdefaults__], depth)
        return f"function {_name(value)} {code_digest(value.__code__)} {rest} {cells}"

    def _all(self, items: list[tuple[Any, Any]], depth: int) -> str:
        """In their order: the order of hooks and layers counts."""
        kept = [(k, v) for k, v in items if not isinstance(k, str) or k not in _IGNORED]
        return str([f"{_key(k)}: {self.text(v, depth)}" for k, v in kept])

    def _unknown(self, value: Any) -> str:
        if self._strict:
            raise NotSavedError(f"an object of {_name(type(value))}, which it may read, has no key")
        return f"object of {_name(type(value))}"


def _held(value: Any) -> list[tuple[Any, Any]] | None:
    """What stands in an object's attributes, of slots too; None: it shows none."""
    slots = [
        name for cls in type(value).__mro__
        for name in _as_tuple(vars(cls).get("__slots__", ())) if name != "__dict__"
    ]  # fmt: skip
    if not slots and not hasattr(value, "__dict__"):
        return None
    own = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return own + list(getattr(value, "__dict__", {}).items())


def _as_tuple(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _key(key: Any) -> str:
    if type(key) in _PLAIN or isinstance(key, (*_OF_TORCH, tuple, enum.Enum)):
        return repr(key)
    return str(getattr(key, "__qualname__", type(key).__qualname__))


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """All but weights, and what only compiling reads."""
    left_out = ("_parameters", "_buffers", "_compiled_call_impl", "_non_persistent_buffers_set")
    return [(k, _hooks(v) if "hooks" in k else v) for k, v in vars(module).items()
            if k not in left_out]  # fmt: skip


def _hooks(value: Any) -> Any:
    """Without the numbers that hooks get in a process."""
    return list(value.values()) if isinstance(value, Mapping) else value


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def code_digest(code: types.CodeType) -> str:
    """Of what it does, not of where it stands."""
    digest = hashlib.sha256()
    for part in _code_parts(code):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _code_parts(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):
            yield str(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
