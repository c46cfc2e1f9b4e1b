"""What of a model may not change while a session lives: modes, configs, hooks and numbers.

A captured step runs none of the model's Python, and a compiled one runs what was traced. So what
has changed must change no result; that is tried out. Weights may change in place at any time; where
they stand is `graphs.capture.addresses`' affair.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from attn_ops.integrations.merged import MergedViews
from attn_ops.integrations.transformers import Contract

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

    Entries that the model changes by itself are left out: see `settle`.

    Raises:
        ValueError: the model breaks the contract, or autocast is on.
    """

    def __init__(self, model: nn.Module, contract: Contract) -> None:
        self._model, self._contract = model, contract
        self._device_type = next(model.parameters()).device.type
        self._merged = MergedViews(model)
        self._mine: set[str] = set()
        self._check_globals()
        self._remember()
        self._showed = contract.check()
        self.settle()

    def check(self) -> None:
        """Raise a ValueError that names what has changed.

        For the 32 layers of Llama-3-8B 0.3 ms, while the device computes (H200 host, 2026-11-22).
        """
        self._merged.check()
        self._check_globals()
        try:
            if self._stayed():
                return
        except (KeyError, RuntimeError, ValueError):
            pass  # an attribute is gone, or something cannot be compared
        changed = self._changes()
        if changed:
            self._check_harmless(changed)
        self._remember()  # equal values in other objects

    def _check_harmless(self, changed: list[str]) -> None:
        """Raise a ValueError unless the model still does what it did, in every bit."""
        found = ""
        try:
            if self._contract.check().equals(self._showed):
                return
        except ValueError as error:
            found = f": {error}"
        rest = f" and {len(changed) - 3} more" if changed[3:] else ""
        raise ValueError(
            "modules, attributes and hooks that matter must stay where they were, got "
            f"{'; '.join(changed[:3])}{rest}{found}. Undo it, or make a new DecodeSession; "
            "supported: weights that change in place"
        )

    def _check_globals(self) -> None:
        if torch.is_autocast_enabled(self._device_type):
            raise ValueError(
                "autocast must be off while a session is made and runs, got it on; supported: a "
                "model in the dtype that it is to compute in"
            )

    def settle(self) -> None:
        """Take what has changed since for the model's own doing, and look at it no more."""
        self._mine |= {text.partition(" is ")[0] for text in self._changes()}
        self._remember()

    def _remember(self) -> None:
        entries = [e for e in _entries(self._model) if e[0] not in self._mine]
        self._before = {name: _copy(value) for name, _, _, value in entries}
        self._boxes = [value for *_, value in entries if isinstance(value, _CONTAINERS)]
        entries = [e for e in entries if e[2] not in _HOOKS]  # nobody replaces those dicts
        self._holders = [holder for _, holder, _, _ in entries]
        self._keys = [key for _, _, key, _ in entries]
        self._values = [value for *_, value in entries]
        self._counts = list(map(len, self._boxes))
        self._full = [box for box in self._boxes if box]  # few, as most are hooks
        self._full_copies = [box.copy() for box in self._full]
        holders = {id(h): h for h in self._holders}
        self._dicts = list(holders.values())
        self._lengths = list(map(len, self._dicts))
        modules = list(self._model.modules())
        self._modules, self._types = modules, list(map(type, modules))
        self._classes = list(dict.fromkeys(self._types))
        self._forwards = self._class_forwards()

    def _class_forwards(self) -> list[Callable[..., Any]]:
        return list(map(getattr, self._classes, itertools.repeat("forward")))

    def _stayed(self) -> bool:
        """Each comparison runs along a list in C."""
        now = map(operator.getitem, self._holders, self._keys)
        return (
            all(map(operator.is_, now, self._values))
            and list(map(len, self._boxes)) == self._counts
            and self._full == self._full_copies
            and list(map(len, self._dicts)) == self._lengths
            and list(map(type, self._modules)) == self._types
            and self._class_forwards() == self._forwards
        )

    def _changes(self) -> list[str]:
        """`name is now, not before` of everything that differs."""
        now = {n: v for n, _, _, v in _entries(self._model) if n not in self._mine}
        before = self._before
        changed = [
            f"{name} is {_plain(now.get(name))}, not {_plain(before.get(name))}"
            for name in dict.fromkeys([*before, *now])
            if name not in now or name not in before or not _equal(before[name], now[name])
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


def _entries(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Name, holder, key and value of every attribute that counts."""
    configs: dict[int, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, part in module._modules.items():
            yield f"weights.{prefix}{key}", module._modules, key, part
        yield from _attributes(prefix, vars(module), configs)
    done: set[int] = set()
    while pending := [c for i, c in configs.items() if i not in done]:
        for config in pending:
            done.add(id(config))
            prefix = f"{type(config).__name__}."
            yield from _attributes(prefix, vars(config), configs)


def _attributes(
    prefix: str, holder: dict[str, Any], configs: dict[int, Any]
) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    for key, value in holder.items():
        if key not in _IGNORED:
            if hasattr(value, "model_type") and hasattr(value, "to_dict"):
                configs[id(value)] = value
            yield prefix + key, holder, key, value


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, _CONTAINERS) else value


def _equal(before: Any, now: Any) -> bool:
    """Whether two values mean the same; what cannot be compared must be the same object."""
    if before is now:
        return True
    if type(before) is not type(now) or isinstance(before, torch.Tensor | nn.Module):
        return False
    try:
        return bool(before == now) or (before != before and now != now)  # NaN
    except (RuntimeError, TypeError, ValueError):
        return False


def _plain(value: Any) -> str:
    return f"{value!r:.60}"
