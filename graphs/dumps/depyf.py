"""depyf's files as part of a dump.

Whatever depyf does wrong becomes a note, and the compilation goes on without it.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils
from torch._inductor.codecache import PyCodeCache

_block: dict[str, Any] = {"notes": []}
"""Of the active block: its notes, torch's and depyf's ways to print a graph, the dump's directory.

Global: depyf swaps functions of torch, so there can be only one block, and `_format_graph` runs as
the code of another function.
"""


@contextlib.contextmanager
def writing_depyf_files(directory: Path, notes: list[str]) -> Iterator[None]:
    """`depyf.prepare_debug(directory)` that never raises; what goes wrong is put into `notes`."""
    with contextlib.ExitStack() as stack:
        try:
            _enter(stack, directory)
        except ImportError:
            notes.append(
                "depyf is not installed, so it wrote no files; `pip install depyf` adds them."
            )
        except Exception as error:
            notes.append(f"depyf could not start, so it wrote no files: {_line(error)}")
        try:
            yield
        finally:
            try:
                with warnings.catch_warnings():
                    # depyf warns about advice that does not apply here.
                    warnings.simplefilter("ignore")
                    stack.close()
            except Exception as error:
                notes.append(f"depyf could not write everything: {_line(error)}")
            notes += dict.fromkeys(_block["notes"])
            _block["notes"].clear()


def _enter(stack: contextlib.ExitStack, directory: Path) -> None:
    import depyf
    from depyf.explain import enable_debugging
    from depyf.explain.global_variables import data

    if data.get("is_inside_prepare_debug"):
        raise RuntimeError("it is active already; blocks of it do not nest")
    # depyf forgets it when it fails itself.
    stack.callback(data.update, is_inside_prepare_debug=False)
    function = dynamo_utils.lazy_format_graph_code
    _block["torchs"] = _copied(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(depyf.prepare_debug(str(directory)))
    hook = enable_debugging.DebuggableHook
    for owner, name, original in (
        (torch.fx.graph_module, "_exec_with_source", data["unpatched__exec_with_source"]),
        (PyCodeCache, "load_by_key_path", data["unpatched_load_by_key_path"]),
        (hook, "__call__", lambda *args: None),
    ):
        theirs = getattr(owner, name)
        _replace(stack, owner, name, _guarded(theirs, original))
    # This one is imported in many places, so depyf swaps its code; so do we.
    _block.update(theirs=_copied(function), directory=Path(data["dump_src_dir"]))
    _replace(stack, function, "__code__", _format_graph.__code__)


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _copied(function: Any) -> FunctionType:
    """A function with the code that `function` has now."""
    defaults = function.__defaults__
    return FunctionType(function.__code__, function.__globals__, function.__name__, defaults)


def _format_graph(name: str, gm: Any, maybe_id: int | None = None, **kwargs: Any) -> Any:
    """Runs with the globals of torch._dynamo.utils, so it must find its own by importing them."""
    from graphs.dumps.depyf import _block, _guarded, _is_in_dump

    def format_graph(*args, **kwargs):  # an annotation would be looked up in those globals
        return _block["theirs" if _is_in_dump(gm) else "torchs"](*args, **kwargs)

    return _guarded(format_graph, _block["torchs"])(name, gm, maybe_id, **kwargs)


def _is_in_dump(gm: torch.fx.GraphModule) -> bool:
    """Whether depyf wrote the graph's code: it puts further files beside that one.

    Other code is no file. Its name begins with `<eval_with_key>`, and may hold the path of another
    file; depyf would make folders of that.
    """
    str(gm)  # a lazy graph module has no code before
    source = inspect.getsourcefile(inspect.unwrap(gm.forward))
    return source is not None and Path(source).parent == _block["directory"]


def _guarded(theirs: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`theirs`, and `original` where it raises."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(*args, **kwargs)
        except Exception as error:
            _block["notes"].append(f"depyf left something out: {_line(error)}")
            return original(*args, **kwargs)

    return call


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
