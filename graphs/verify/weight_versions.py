"""Whether weights were changed in place or replaced, by torch's counters of changes."""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


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
        links += [link for module in modules for link in _attributes(module)]
        self._holders, self._keys = [h for h, _ in links], [k for _, k in links]
        self._values = [holder[key] for holder, key in links]
        self._tensors = [value for value in self._values if value is not None]
        self._versions = _versions(self._tensors)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
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
