"""Detects model changes that make captured graphs or compiled code stale.

Every step looks for training mode, another attention implementation, other adapters, hooks and
autocast. Replaced parameters show by their addresses (`graphs.capture.addresses`, `MergedViews`).
After any other change the caller makes a new session; docs/contract.md says so.
"""

import operator

import torch
from torch import nn

from attn_ops.integrations.merged_views import MergedViews
from attn_ops.integrations.transformers import Contract, attention_configs

_TRAINING = operator.attrgetter("training")
_IMPLEMENTATION = operator.attrgetter("_attn_implementation")


def _adapter_of(module: nn.Module) -> tuple[object, ...]:
    """What a layer of peft's does with its adapters; not all of its layers can be merged."""
    names = ("_active_adapter", "_disable_adapters", "merged")
    return tuple(getattr(module, name, None) for name in names)


class ModelState:
    """What must stay as it was when the session was made.

    Raises:
        ValueError: the model breaks its contract, autocast is on, or a compiled model meets global
            hooks.
    """

    def __init__(self, model: nn.Module, contract: Contract, *, compiled: bool) -> None:
        self._model, self._compiled = model, compiled
        self._device_type = next(model.parameters()).device.type
        self._check_process()
        contract.prepare()
        contract.check()
        modules = list(model.modules())
        self._in_eval = [module for module in modules if not module.training]
        self._configs = attention_configs(model)
        self._implementations = list(map(_IMPLEMENTATION, self._configs))
        self._hooks = [d for m in modules for d in (m._forward_pre_hooks, m._forward_hooks)]
        self._num_hooks = list(map(len, self._hooks))
        self._adapted = [m for m in modules if hasattr(m, "_active_adapter")]
        self._adapters = list(map(_adapter_of, self._adapted))
        self._merged = MergedViews(model)

    def check(self, *, captured: bool) -> None:
        """Refuse a changed model, before a step of it is called or captured.

        Args:
            captured: steps are captured, so that hooks that were added later would not run.

        Raises:
            ValueError: names what has changed. Undo it, and the session goes on.
        """
        self._merged.check()
        self._check_process()
        if any(map(_TRAINING, self._in_eval)):
            known = set(self._in_eval)
            names = (n for n, m in self._model.named_modules() if m.training and m in known)
            raise ValueError(
                f"{next(names) or 'model'}.training must be False, got True; call model.eval()"
            )
        now = list(map(_IMPLEMENTATION, self._configs))
        if now != self._implementations:
            raise ValueError(
                f"attn_implementation must stay {self._implementations}, got {now}; supported: "
                "setting it back, or a new DecodeSession"
            )
        if list(map(_adapter_of, self._adapted)) != self._adapters:
            raise ValueError(
                "adapters of the model must stay as they were, got others active, disabled or "
                "merged; supported: undoing it, or a new DecodeSession"
            )
        if (captured or self._compiled) and list(map(len, self._hooks)) != self._num_hooks:
            raise ValueError(
                f"hooks of the model must stay as they were, got {sum(map(len, self._hooks))}, not "
                f"{sum(self._num_hooks)}: compiled and captured code does not see them come and "
                "go; supported: undoing it, or a new DecodeSession"
            )

    def _check_process(self) -> None:
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
