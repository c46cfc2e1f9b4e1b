"""Models and code as text that differs where a compiled graph may differ.

Objects are described by what they hold, functions by their file and line. The files themselves are
read: see `code_of`.
"""

import contextlib
import enum
import functools
import hashlib
import json
import re
import sys
import sysconfig
import time
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graphs.saved.folder import NotSavedError

_BY_REPR = (bytes, complex, type(...), np.generic, torch.dtype, torch.device, torch.layout,
            torch.memory_format, torch.finfo, torch._ops.OpOverload,
            torch._ops.OpOverloadPacket)  # fmt: skip
_CODE = (type, types.FunctionType, staticmethod, classmethod, property)
_VALUES = (int, float, str, type(None), list, tuple, dict, set, frozenset, enum.Enum,
           functools.partial, types.BuiltinFunctionType, *_BY_REPR)  # fmt: skip
_LEFT_OUT = frozenset(("generation_config", "_name_or_path", "_commit_hash", "_compiled_call_impl"))
"""Attributes that no forward reads; the first holds a hash of the process."""
_OF_DYNAMO = re.compile(r"__|\w*\d_c\d+$")
"""Globals that Python or Dynamo adds to a module."""
_TORCH = str(Path(torch.__file__).parent) + "/"
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_STARTED = time.time()


def text_of(value: Any) -> str:
    """Describe a value as JSON; each object once, later by its number.

    Raises:
        NotSavedError: an object does not show what it holds.
    """
    try:
        return json.dumps(value, default=_Describer())
    except (TypeError, ValueError, RecursionError) as error:
        raise NotSavedError(f"the model holds what has no key: {error}") from error


def digest_of(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


class _Describer:
    """Turns an object that JSON does not know into one that it knows."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # objects too: their ids stay taken

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _BY_REPR):
            return repr(value)
        if id(value) in self._seen:
            return f"#{self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, nn.Module):
            return [name_of(type(value)), _attributes(vars(value))]
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, types.FunctionType):
            return _function(value)
        if isinstance(value, types.MethodType):
            owner = value.__self__  # it may hold its method itself, which JSON would call a circle
            return [value.__func__, self(owner) if id(owner) in self._seen else owner]
        if isinstance(value, staticmethod | classmethod):
            return value.__func__
        if isinstance(value, property):
            return [value.fget, value.fset]
        if isinstance(value, type | types.BuiltinFunctionType):
            return name_of(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """What pickle would write of it."""
        try:
            made = value.__reduce_ex__(4)
        except TypeError as error:
            name = name_of(type(value))
            raise NotSavedError(f"an object of {name}, which it may read, has no key") from error
        if type(value) is object or isinstance(made, str):
            raise NotSavedError(f"an object of {name_of(type(value))} has no key")
        return [_attributes(p) if isinstance(p, dict) else list(p) if hasattr(p, "__next__") else p
                for p in made]  # fmt: skip


def _attributes(held: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of an object; hooks without the numbers that a process gives them."""
    return {
        k: list(v.values()) if "hooks" in str(k) and isinstance(v, Mapping) else v
        for k, v in held.items() if k not in _LEFT_OUT
    }  # fmt: skip


def _tensor(t: torch.Tensor) -> list[Any]:
    """Geometry; values do not count. Weights such as torchao's say what they are made of."""
    text = [tuple(t.shape), t.stride(), repr(t.dtype), repr(t.device), t.requires_grad]
    if type(t) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return [*text, t.data_ptr() % 16]
    if not hasattr(t, "__tensor_flatten__"):
        raise NotSavedError(f"a tensor of {type(t).__qualname__} has no key")
    names, context = t.__tensor_flatten__()
    return [*text, name_of(type(t)), context, [(name, getattr(t, name)) for name in names]]


def _function(value: types.FunctionType) -> list[Any]:
    code = value.__code__
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append("empty")
    where = f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}"
    return [where, value.__defaults__, value.__kwdefaults__, cells]


def name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


# -- code ------------------------------------------------------------------------------------------


# Cached: a running process keeps the code that it has imported.
@functools.cache
def own_source() -> str:
    """Digest of our packages: one version does not read what another saved."""
    folders = [Path(str(sys.modules[name].__file__)).parent for name in _OURS]
    return digest_of("".join(file_digest(p) for f in folders for p in sorted(f.rglob("*.py"))))


_OURS = ("attn_ops", "fx_passes", "graphs")


def file_digest(path: str | Path) -> str:
    """Raises NotSavedError: there is no file, or it is newer than the code of this process."""
    try:
        if Path(path).stat().st_mtime > _STARTED:
            raise NotSavedError(f"{path} has changed since this process started")
        return digest_of(Path(path).read_bytes())
    except OSError as error:
        raise NotSavedError(f"code has no source file: {error}") from error


def classes_of(model: nn.Module) -> str:
    """Digest of the classes of a model's modules, bases included, and of their Python modules."""
    classes: dict[type, None] = {}
    for module in model.modules():
        classes |= dict.fromkeys(c for c in type(module).__mro__[:-1] if not _is_of_torch(c))
    modules = _digests(sys.modules[name] for name in sorted({c.__module__ for c in classes}))
    return digest_of(str(modules) + str([(name_of(c), _members(c, True)) for c in classes]))


def traced_modules(code: Iterable[types.CodeType]) -> dict[str, str]:
    """Digests of the modules whose code Dynamo has traced, by name; of torch its version counts.

    Raises:
        NotSavedError: some code has no file.
    """
    by_file = {getattr(m, "__file__", None): m for m in list(sys.modules.values())}
    modules = {}
    for one in code:
        file = one.co_filename
        written = file == "<string>" and one.co_name.startswith("__")  # by `dataclasses`
        if written or file.startswith((_TORCH, "<frozen ")) or _is_stdlib(file):
            continue
        if file not in by_file:
            raise NotSavedError(f"no module was made from {file}")
        modules[file] = by_file[file]
    return _digests(modules.values())


def changed_module(known: Mapping[str, str]) -> str | None:
    """The first module that differs from what `traced_modules` found, or None."""
    for name, digest in known.items():
        if name not in sys.modules or _module_digest(sys.modules[name]) != digest:
            return name
    return None


def _digests(modules: Iterable[types.ModuleType]) -> dict[str, str]:
    """Digests of modules, and of those of the user's that a module of the user's imports."""
    found, pending = {}, list(modules)
    while pending:
        module = pending.pop()
        if module.__name__ in found:
            continue
        found[module.__name__] = _module_digest(module)
        if _is_of_user(module):
            named = [v for v in vars(module).values() if isinstance(v, types.ModuleType)]
            pending += [m for m in named if _is_of_user(m)]
    return found


def _module_digest(module: types.ModuleType) -> str:
    """A module's file, the functions and classes it names now, and the numbers of a user's."""
    if (file := getattr(module, "__file__", None)) is None:
        raise NotSavedError(f"the module {module.__name__} has no file")
    user = _is_of_user(module)
    own = [v for v in vars(module).values()
           if isinstance(v, type) and v.__module__ == module.__name__]  # fmt: skip
    return digest_of(file_digest(file) + str([_members(v, user) for v in (module, *own)]))


def _members(holder: Any, numbers: bool) -> list[str]:
    """The functions and classes of a module or class, and its numbers and the like if wanted.

    A value that cannot be described is left out.
    """
    found = []
    for name, value in sorted(vars(holder).items()):
        with contextlib.suppress(NotSavedError, TypeError, ValueError):
            if _OF_DYNAMO.match(name):
                continue
            if isinstance(value, (*_CODE, *_VALUES) if numbers else _CODE):
                found.append(f"{name} {text_of(value)}")
    return found


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and "site-packages" not in file


def _is_of_user(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__.partition(".")[0] in _OURS:
        return False
    return not file.startswith(tuple(sysconfig.get_paths().values()))
