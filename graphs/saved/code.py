"""The Python code that a compilation has read: files, and what stands in their modules."""

import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.saved.fingerprint import Describer, digest_of
from graphs.saved.plan import NotSavedError

_PACKAGES = ("attn_ops", "fx_passes", "graphs")
_OF_DYNAMO = re.compile(
    r"__.*__$|__compiled_fn_|__import_|__builtins_dict__|__resume_at|_\w*\d_c\d+$"
)
"""Globals that Python or Dynamo adds to a module."""
_NO_MEMBERS = ("__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__annotations__",
               "__static_attributes__", "__firstlineno__")  # fmt: skip
_ENVIRONMENT = frozenset(("environ", "environb", "getenv"))
_TORCH = str(Path(torch.__file__).parent) + "/"
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"


# Cached: the files of a running process do not count, but those that it has imported.
@functools.cache
def own_source() -> str:
    """Digest of our packages: what is saved by one version is not read by another."""
    digest = hashlib.sha256()
    for name in _PACKAGES:
        folder = Path(str(sys.modules[name].__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def classes_of(model: nn.Module) -> str:
    """Digest of the classes of the model's modules, their bases included."""
    seen: dict[type, None] = {}
    for module in model.modules():
        seen |= dict.fromkeys(type(module).__mro__[:-1])
    describer = Describer(strict=False)
    return digest_of("\n".join(class_text(cls, describer) for cls in seen))


def class_text(cls: type, describer: Describer, *, code_only: bool = False) -> str:
    members = sorted(vars(cls).items())
    if cls.__module__.startswith("torch."):  # its version is in the key, and Dynamo patches it
        members = [(k, v) for k, v in members if k == "forward"]
    members = [
        (k, v) for k, v in members
        if k not in _NO_MEMBERS and (not code_only or _is_code(v))
    ]  # fmt: skip
    text = "".join(f" {k}={describer.text(v)}" for k, v in members)
    return f"{cls.__module__}.{cls.__qualname__}{text}"


def names_of(code: Iterable[types.CodeType]) -> list[str]:
    """All names that traced code reads: of globals and of attributes."""
    return sorted({name for one in code for name in one.co_names})


def traced_modules(code: list[types.CodeType]) -> dict[str, str]:
    """By module that Dynamo has traced, the digest of its file and of what stands in it.

    Modules of torch are left out, as its version is in the key. Modules that a module of the user's
    names are followed, as it may read numbers of them.

    Raises:
        NotSavedError: some code has no file, or reads what has no description: an object without
            attributes, or the environment.
    """
    names = frozenset(names_of(code))
    by_file = _modules_by_file()
    pending = []
    for one in code:
        file = one.co_filename
        if file in by_file:
            pending.append(by_file[file])
            if _is_of_user(by_file[file]) and not _ENVIRONMENT.isdisjoint(one.co_names):
                raise NotSavedError(f"{one.co_qualname} reads the environment")
        elif not _is_generated(one):
            raise NotSavedError(f"no module was made from {file}")
    pending = [m for m in dict.fromkeys(pending) if not _has_version(m)]
    found: dict[str, str] = {}
    while pending:
        module = pending.pop()
        if module.__name__ not in found:
            found[module.__name__], met = _module_digest(module, names)
            pending += [m for m in met if _is_of_user(m)]
    return found


def changed_module(known: dict[str, str], names: Iterable[str]) -> str | None:
    """The first module that is not as it was; None: all are.

    Args:
        known: what `traced_modules` found.
        names: `names_of` the code that was traced.
    """
    read = frozenset(names)
    for name, digest in known.items():
        module = sys.modules.get(name)
        if module is None or _module_digest(module, read)[0] != digest:
            return name
    return None


def _modules_by_file() -> dict[str, types.ModuleType]:
    modules = [(m, getattr(m, "__file__", None)) for m in list(sys.modules.values())]
    return {file: m for m, file in modules if isinstance(m, types.ModuleType) and file}


def _is_generated(code: types.CodeType) -> bool:
    """Whether it is of Python itself, or a method that `dataclasses` has written."""
    written = code.co_filename == "<string>" and code.co_name.startswith("__")
    return written or code.co_filename.startswith("<frozen ")


def _has_version(module: types.ModuleType) -> bool:
    """Whether it is of torch or Python."""
    file = str(module.__file__)
    if file.startswith(_TORCH):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file


def _is_of_user(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__.split(".")[0] in _PACKAGES:
        return False
    return not file.startswith(tuple(sysconfig.get_paths().values()))


def _module_digest(
    module: types.ModuleType, names: frozenset[str]
) -> tuple[str, list[types.ModuleType]]:
    """The digest, and the modules that it names.

    Of a user's module, values whose names traced code reads are described with all they hold.
    """
    describer, strict, lines = Describer(strict=False), Describer(strict=True), []
    file = inspect.getsourcefile(module)
    lines.append(hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "no file")
    is_of_user = _is_of_user(module)
    for name, value in sorted(vars(module).items()):
        if _OF_DYNAMO.match(name) or not (is_of_user or _is_code(value)) or _is_register(value):
            continue
        whole = is_of_user and name in names and not _is_code(value)
        lines.append(f"{name}={(strict if whole else describer).text(value)}")
        if isinstance(value, type) and value.__module__ == module.__name__:
            lines.append(class_text(value, describer, code_only=not is_of_user))
            lines += [
                f"{name}.{k}={strict.text(v)}" for k, v in sorted(vars(value).items())
                if is_of_user and k in names and not _is_code(v) and not _is_slot(v)
            ]  # fmt: skip
    return digest_of("\n".join(lines)), [*describer.modules, *strict.modules]


def _is_code(value: Any) -> bool:
    """Whether it is code, or a table of functions; other globals of a library may fill later."""
    if isinstance(value, Mapping):
        return not isinstance(value, dict)
    return isinstance(value, type | staticmethod | classmethod | property) or callable(value)


def _is_slot(value: Any) -> bool:
    """Whether it gives instances an attribute, and is no value itself."""
    return inspect.isdatadescriptor(value)


def _is_register(value: Any) -> bool:
    """Whether it fills while the process runs: loggers and caches."""
    name = type(value).__module__
    of_registers = name in ("logging", "_thread", "threading", "weakref", "contextvars")
    return of_registers and not isinstance(value, threading.local)
