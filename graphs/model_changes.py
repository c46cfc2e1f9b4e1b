"""Detects model changes that would make captured graphs stale.

A captured step runs none of the model's Python, and a compiled one runs what was traced. Weights
may change in place at any time: torch's counters tell, and shared prefixes are forgotten then.
`graphs.capture.addresses` checks where the weights are.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from attn_ops.integrations.merged import MergedViews
from attn_ops.integrations.transformers import PATCHING, Contract

_HOOKS = frozenset(("_forward_hooks", "_forward_pre_hooks"))
_OWN = frozenset(vars(nn.Module())) - _HOOKS - {"training"}
_IGNORED = _OWN | {
    "use_cache",  # asked for in every call
    "gradient_checkpointing",  # of training
    "_gradient_checkpointing_func",
    "_attn_implementation_autoset",
    "generation_config",
    "_name_or_path",
    "_commit_hash",
}
"""Attributes that change nothing of a forward without gradients."""

_CONTAINERS = (list, dict, set)


class ModelState:
    """Attributes of modules and configs as they were, compared in few calls.

    A change is accepted if the model still keeps its contract. Graphs of the model must then be
    captured anew. Dynamo guards on attributes, but not on hooks, classes and functions:
    those of a compiled model must stay. What the model changes in its own forward is left out.

    Raises:
        ValueError: the model breaks the contract, or autocast is on.
    """

    def __init__(self, model: nn.Module, contract: Contract, *, compiled: bool) -> None:
        self._model, self._contract, self._compiled = model, contract, compiled
        self._device_type = next(model.parameters()).device.type
        self._own: set[str] = set()
        self.stale = False  # graphs are older than the model; reset by the code that drops them
        self._check_globals()
        contract.prepare()
        self._remember()
        self._check_contract()

    def check(self) -> bool:
        """Whether something has changed that graphs may have frozen.

        For the 32 layers of Llama-3-8B 0.3 ms, while the device computes (H200 host, 2026-11-22).

        Raises:
            ValueError: the model does not keep its contract any more, a compiled model has other
                hooks, functions or modules, merged weights were taken apart, or autocast is on.
        """
        self._merged.check()
        self._check_globals()
        if self._stayed():
            return self.stale
        with PATCHING:  # a session that is being made has a hook on its model for a while
            if self._stayed():
                return self.stale
            changed = self._changes()
            if changed:
                self._check_change(changed)
            else:
                self._remember()  # equal values in other objects
        return self.stale

    def _check_change(self, changed: list[str]) -> None:
        shown = "; ".join(changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        message = (
            "modules, functions and hooks of the model must stay where they were, got "
            f"{shown}. Undo it, or make a new DecodeSession"
        )
        if any(text.startswith("weights.") for text in changed):
            raise ValueError(message)
        if self._compiled and any(map(_is_code, changed)):
            raise ValueError(f"{message}; supported: models that are not compiled")
        before = dict(vars(self))
        try:
            self.stale = True
            self._remember()
            self._check_contract()
        except BaseException as error:  # interrupted, too: nothing has been checked
            vars(self).update(before)
            if not isinstance(error, Exception):
                raise
            raise ValueError(f"{message}: {error}") from error

    def _check_contract(self) -> None:
        """Check it; what the forwards have changed is the model's own."""
        self._contract.check()
        changed = {text.partition(" is ")[0] for text in self._changes()}
        kept = {n for n in changed if n.endswith(".training") or n.startswith("weights.")}
        self._own = self._own | (changed - kept)  # another set: an interrupt brings the old back
        self._remember()

    def _check_globals(self) -> None:
        if torch.is_autocast_enabled(self._device_type):
            raise ValueError(
                "autocast must be off while a session is made and runs, got it on; supported: a "
                "model in the dtype that it is to compute in"
            )
        if self._compiled and nn.modules.module._has_any_global_hook():
            raise ValueError(
                "hooks must be registered on a compiled model's own modules, got global hooks, "
                "which torch.compile misses or calls twice; supported: "
                "module.register_forward_hook, or a model that is not compiled"
            )

    def _remember(self) -> None:
        self._merged = MergedViews(self._model)
        entries = [e for e in _entries(self._model) if e[0] not in self._own]
        self._before = {name: _copy(value) for name, _, _, value in entries}
        self._boxes = [value for *_, value in entries if isinstance(value, _CONTAINERS)]
        entries = [e for e in entries if e[2] not in _HOOKS]  # those dicts are never replaced
        self._holders = [holder for _, holder, _, _ in entries]
        self._keys = [key for _, _, key, _ in entries]
        self._values = [value for *_, value in entries]
        held = list(_tensor_dicts(self._model))
        self._tensors = _presence(held, self._own)
        self._tensor_dicts = [holder for _, holder in held]
        self._num_tensors = list(map(len, self._tensor_dicts))
        empty = [(h, key) for _, h in held for key, tensor in h.items() if tensor is None]
        self._empty_holders, self._empty_keys = [h for h, _ in empty], [k for _, k in empty]
        self._counts = list(map(len, self._boxes))
        self._full = [box for box in self._boxes if box]  # few, as most are hooks
        self._full_copies = [_copy(box) for box in self._full]
        self._dicts = list({id(h): h for h in self._holders}.values())
        self._lengths = list(map(len, self._dicts))
        modules = list(self._model.modules())
        self._modules, self._types = modules, list(map(type, modules))
        self._classes = list(dict.fromkeys(self._types))
        self._forwards = self._class_forwards()

    def _class_forwards(self) -> list[Callable[..., Any]]:
        return list(map(getattr, self._classes, itertools.repeat("forward")))

    def _stayed(self) -> bool:
        """Each comparison runs along a list in C."""
        try:
            now = map(operator.getitem, self._holders, self._keys)
            return (
                all(map(operator.is_, now, self._values))
                and not any(map(_is_held, self._empty_holders, self._empty_keys))
                and list(map(len, self._tensor_dicts)) == self._num_tensors
                and list(map(len, self._boxes)) == self._counts
                and self._full == self._full_copies
                and list(map(len, self._dicts)) == self._lengths
                and list(map(type, self._modules)) == self._types
                and self._class_forwards() == self._forwards
            )
        except (KeyError, RuntimeError, ValueError):
            return False  # an attribute is gone, or something cannot be compared

    def _changes(self) -> list[str]:
        """`name is now, not before` of everything that differs."""
        now = {n: v for n, _, _, v in _entries(self._model) if n not in self._own}
        before = self._before
        changed = [
            f"{name} is {_plain(now.get(name))}, not {_plain(before.get(name))}"
            for name in dict.fromkeys([*before, *now])
            if name not in now or name not in before or not _equal(before[name], now[name])
        ]
        tensors = _presence(_tensor_dicts(self._model), self._own)
        changed += [
            f"{name} is {tensors.get(name, 'gone')}, not {self._tensors.get(name, 'missing')}"
            for name in dict.fromkeys([*self._tensors, *tensors])
            if tensors.get(name) != self._tensors.get(name)
        ]
        changed += [
            f"{module._get_name()} is another class, not {old.__name__}"
            for module, old in zip(self._modules, self._types, strict=True)
            if type(module) is not old
        ]
        pairs = zip(self._classes, self._forwards, strict=True)
        changed += [
            f"{cls.__name__}.forward is another function" for cls, old in pairs
            if cls.forward is not old
        ]  # fmt: skip
        return changed


Entry = tuple[str, dict[str, Any], str, Any]
"""Name, holder, key and value of an attribute."""


def _entries(model: nn.Module) -> Iterator[Entry]:
    """Every attribute that counts; of modules first, then of what they hold."""
    held: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, part in module._modules.items():
            yield f"weights.{prefix}{key}", module._modules, key, part
        yield from _attributes(prefix, vars(module), held)
    done: set[int] = set()
    while pending := [(i, *found) for i, found in held.items() if i not in done]:
        for identity, name, thing in pending:
            done.add(identity)
            yield from _attributes(f"{name}.", vars(thing), held)


def _attributes(
    prefix: str, holder: dict[str, Any], held: dict[int, tuple[str, Any]]
) -> Iterator[Entry]:
    for key, value in holder.items():
        if key not in _IGNORED:
            if _is_record(value):
                held.setdefault(id(value), (prefix + key, value))
            yield prefix + key, holder, key, value


def _tensor_dicts(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parameters and buffers of every module."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield prefix, module._parameters
        yield prefix, module._buffers


def _presence(dicts: Iterable[tuple[str, dict[str, Any]]], own: set[str]) -> dict[str, str]:
    """By name, whether there is a tensor; `graphs.capture.addresses` says which one it is."""
    return {
        prefix + key: "None" if tensor is None else "a tensor"
        for prefix, holder in dicts
        for key, tensor in holder.items()
        if prefix + key not in own
    }


def _is_held(holder: dict[str, Any], key: str) -> bool:
    return holder[key] is not None


def _is_record(value: Any) -> bool:
    """A config, or another object that only holds values."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    is_config = hasattr(value, "model_type") and hasattr(value, "to_dict")
    return is_config or isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value)


def _is_code(change: str) -> bool:
    """Whether Dynamo may not see it: a function, a class or a hook."""
    name = change.partition(" is ")[0]
    is_hook = name.rpartition(".")[2] in _HOOKS
    return is_hook or name.endswith("forward") or "is another" in change


def _copy(value: Any) -> Any:
    """Containers, and those in them, anew; what they hold stays the same."""
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    if isinstance(value, list | set):
        return type(value)(map(_copy, value))
    return value


def _equal(before: Any, now: Any) -> bool:
    """Whether two values mean the same; what cannot be compared must be the same object."""
    if before is now:
        return True
    alike = type(before) is type(now) or (isinstance(before, dict) and isinstance(now, dict))
    if not alike or isinstance(before, torch.Tensor | nn.Module):
        return False
    try:
        return bool(before == now) or (before != before and now != now)  # NaN
    except (RuntimeError, TypeError, ValueError):
        return False


def _plain(value: Any) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else f"{value!r:.60}"


class WeightVersions:
    """Parameters, buffers and tensors that are attributes of modules, such as scales of a cache.

    Tensors in lists, tuples and dicts that are attributes count, too. Torch counts changes in
    place, but not those in `tensor.data`, by fused optimizers, and by kernels that write to an
    address. So every step of an optimizer of `torch.optim` is a change, whatever it steps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        _OptimizerSteps.watch()
        self._look_up()

    @property
    def counted(self) -> bool:
        """Whether torch counts changes of all of them: not of tensors of inference mode."""
        return self._versions is not None

    def changed(self) -> bool:
        """Whether any was changed, replaced, added or removed since `remember`.

        True where none is counted.
        """
        try:
            values = list(map(operator.getitem, self._holders, self._keys))
        except (KeyError, IndexError):
            return True
        same = all(map(operator.is_, values, self._values))
        if not same or list(map(len, self._dicts)) != self._sizes:
            return True
        if _OptimizerSteps.number != self._num_steps:
            return True
        return self._versions is None or _versions(self._tensors) != self._versions

    def remember(self) -> None:
        """Take them as they are now."""
        self._look_up()

    def _look_up(self) -> None:
        self._num_steps = _OptimizerSteps.number
        modules = list(self._model.modules())
        self._dicts = [d for module in modules for d in (module._parameters, module._buffers)]
        self._sizes = list(map(len, self._dicts))
        links = [(holder, key) for holder in self._dicts for key in holder]  # None is one, too
        links += [link for module in modules for link in _links(module)]
        self._holders, self._keys = [h for h, _ in links], [k for _, k in links]
        self._values = [holder[key] for holder, key in links]
        self._tensors = [value for value in self._values if value is not None]
        self._versions = _versions(self._tensors)


def _links(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Where tensors are held that are neither parameters nor buffers: holder and key."""
    attributes = vars(module)
    for key, value in attributes.items():
        if isinstance(value, torch.Tensor):
            yield attributes, key
        elif isinstance(value, list | tuple):
            yield from ((value, i) for i, one in enumerate(value) if isinstance(one, torch.Tensor))
        elif isinstance(value, dict) and key not in ("_parameters", "_buffers"):
            yield from ((value, k) for k, one in value.items() if isinstance(one, torch.Tensor))


def _versions(tensors: Sequence[Any]) -> list[tuple[int, int]] | None:
    """Counters of changes, and addresses, which `tensor.data = new` changes alone.

    None where a tensor has no counter.
    """
    try:
        return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
    except RuntimeError:  # made in inference mode
        return None


class _OptimizerSteps:
    """How often any optimizer has stepped in this process, since the first session that asks.

    Attributes:
        number: of steps.
    """

    number = 0

    @staticmethod
    # Cached: one hook a process, whatever the number of sessions.
    @functools.cache
    def watch() -> None:
        register_optimizer_step_post_hook(_OptimizerSteps._count)

    @staticmethod
    def _count(*_: object) -> None:
        _OptimizerSteps.number += 1


def checked_versions(model: torch.nn.Module) -> WeightVersions:
    """Those of a model whose blocks are shared, or a ValueError where torch counts no changes."""
    versions = WeightVersions(model)
    if not versions.counted:
        raise ValueError(
            "share_prefixes must be False for a model made in torch.inference_mode(), whose "
            "changes of weights torch does not count, got True; supported: False"
        )
    return versions
