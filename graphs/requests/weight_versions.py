"""Detects changed weights, which make kept prefixes stale."""

import operator
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


def _few_values(weight: torch.Tensor) -> torch.Tensor | None:
    """A view of up to 8 values in the middle of a weight; None: it has none that can be read."""
    x = weight.detach()
    if type(x) is not torch.Tensor or x.is_meta or not x.numel():
        return None
    while x.dim() > 1:
        x = x[len(x) // 2]
    return x.view(1) if x.dim() == 0 else x[len(x) // 2 :][:8]


class WeightVersions:
    """Tells whether weights have changed, so that kept prefixes are forgotten.

    Weights are parameters, buffers, and tensors that are attributes of modules, such as scales of a
    cache. Torch counts changes in place, but not those through `tensor.data`, by fused optimizers,
    and by kernels that write to an address. So every step of an optimizer of `torch.optim` counts,
    and a few values of each weight are kept: who writes a weight so writes all of it.

    Raises:
        ValueError: torch does not count changes of the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        stepped = self._stepped = [False]
        handle = register_optimizer_step_post_hook(lambda *_: stepped.__setitem__(0, True))
        weakref.finalize(self, handle.remove)
        self.remember()

    def changed(self, *, values_too: bool = False) -> bool:
        """Whether a weight was changed, replaced, added or removed since `remember`.

        `values_too`: look at the kept values, which waits for the device.
        """
        try:
            values = list(map(operator.getitem, self._holders, self._keys))
        except KeyError:
            return True
        return (
            self._stepped[0]
            or not all(map(operator.is_, values, self._values))
            or list(map(len, self._dicts)) != self._sizes
            or self._versions != self._versions_now()
            or (values_too and not all(map(torch.equal, self._kept, self._kept_now())))
        )

    def remember(self) -> None:
        """Take the weights as they are now."""
        self._stepped[0] = False
        modules = list(self._model.modules())
        self._dicts = [d for m in modules for d in (m._parameters, m._buffers)]
        self._sizes = list(map(len, self._dicts))
        # None is one, too. Frequencies of RoPE are none: every forward of longrope writes them.
        ropes = [m for m in modules if hasattr(m, "rope_type")]
        own = {id(m._buffers): m._non_persistent_buffers_set for m in ropes}
        places = [(d, key) for d in self._dicts for key in d if key not in own.get(id(d), ())]
        for attributes in map(vars, modules):
            tensors = (k for k, value in attributes.items() if isinstance(value, torch.Tensor))
            places += [(attributes, key) for key in tensors]
        self._holders, self._keys = [h for h, _ in places], [key for _, key in places]
        self._values = [holder[key] for holder, key in places]
        self._tensors = [value for value in self._values if value is not None]
        self._versions = self._versions_now()
        few: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            if (values := _few_values(tensor)) is not None:
                few.setdefault((tensor.dtype, tensor.device), []).append(values)
        self._few = list(few.values())
        self._kept = self._kept_now()

    def _kept_now(self) -> list[torch.Tensor]:
        """Bits of the few values of all weights, by dtype and device."""
        return [torch.cat(parts).view(torch.uint8) for parts in self._few]

    def _versions_now(self) -> list[tuple[int, int]]:
        """Counters of changes, and addresses, which `tensor.data = new` changes alone."""
        try:
            return [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]
        except RuntimeError:  # tensors of inference mode have no counter
            raise ValueError(
                "share_prefixes must be False for a model made in torch.inference_mode(), whose "
                "changes of weights torch does not count, got True; supported: False"
            ) from None
