"""A model that a Python file defines: `attn-ops run --model FILE.py`, or `FILE.py:NAME`.

The file has `MODEL`, a class of Transformers' models, and `CONFIG`, a config of it, or another one
called NAME. Its weights are random. What can be told without running the file is told first: the
command line imports this before torch.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def is_file(model: str) -> bool:
    """Whether a model is named as a Python file."""
    return _path(model).suffix == ".py"


def check_file(model: str) -> None:
    """Raise a ValueError unless the file is there."""
    if not _path(model).is_file():
        raise ValueError(f"model must be a Python file that exists, got {model!r}")


def definition(model: str) -> tuple[Any, Any]:
    """The class and the config that a file has.

    Raises:
        ValueError: the file is not there, cannot be run, lacks one of them, or has something else
            in its place.
    """
    check_file(model)
    path, name = _path(model).resolve(), _config_name(model)
    module = _run(path)
    for wanted in ("MODEL", name):
        if not hasattr(module, wanted):
            raise ValueError(f"model must be a Python file with {wanted}, got {model!r}")
    model_class, config = module.MODEL, getattr(module, name)
    if not (isinstance(model_class, type) and getattr(model_class, "can_generate", bool)()):
        raise ValueError(
            f"MODEL of {model!r} must be a class of Transformers' models that generate, "
            f"got {getattr(model_class, '__name__', repr(model_class))}"
        )
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"{name} of {model!r} must be a config of Transformers, got {config!r}")
    return model_class, config


def _run(path: Path) -> Any:
    """The file as a module; run once, so that its classes are the same in every call."""
    name = f"attn_ops_model_file.{path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "its suffix is .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        del sys.modules[name]
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"model must be a Python file that runs, got {path}: {reason}") from error
    return module


def _path(model: str) -> Path:
    return Path(model.rpartition(":")[0] if _config_name(model) != "CONFIG" else model)


def _config_name(model: str) -> str:
    file, _, name = model.rpartition(":")
    return name if file.endswith(".py") and name.isidentifier() else "CONFIG"
