"""Whether weights were changed in place or replaced, by torch's counters of changes."""

import operator
from collections.abc import Sequence
from typing import Any

import torch


class WeightVersions:
    """Parameters, buffers and tensors that are attributes of modules, such as scales of a cache.

    Torch counts changes in place. It does not count those through `tensor.data`, nor those by
    kernels that write to an address.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._look_up()

    @property
    def counted(self) -> bool:
        """Whether torch counts changes of all of them: not of tensors of inference mode."""
        return self._versions is not None

    def changed(self) -> bool:
        """Whether any was changed or replaced since `remember`; True where none is counted."""
        try:
            tensors = list(map(operator.getitem, self._holders, self._keys))
        except KeyError:
            return True
        same = all(map(operator.is_, tensors, self._tensors))
        return not same or self._versions is None or _versions(tensors) != self._versions

    def remember(self) -> None:
        """Take them as they are now."""
        self._look_up()

    def _look_up(self) -> None:
        links = [
            (holder, key)
            for module in self._model.modules()
            for holder in (module._parameters, module._buffers, vars(module))
            for key, value in holder.items()
            if isinstance(value, torch.Tensor)
        ]
        self._holders, self._keys = [h for h, _ in links], [k for _, k in links]
        self._tensors = [holder[key] for holder, key in links]
        self._versions = _versions(self._tensors)


def _versions(tensors: Sequence[Any]) -> list[int] | None:
    """Counters of changes; None where a tensor has none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # made in inference mode
        return None


def checked_versions(model: torch.nn.Module) -> WeightVersions:
    """Those of a model whose blocks are shared, or a ValueError where torch counts no changes."""
    versions = WeightVersions(model)
    if not versions.counted:
        raise ValueError(
            "share_prefixes must be False for a model made in torch.inference_mode(), whose "
            "changes of weights torch does not count, got True; supported: False"
        )
    return versions
