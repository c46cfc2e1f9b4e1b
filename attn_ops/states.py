"""States of layers that keep no keys and values: a slot a request, in one tensor a layer.

P slots; slot 0 is the null slot, that of padding.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence

import torch

NULL_SLOT = 0
"""Nobody's: operators neither read nor write it."""

Place = tuple[str, int, int]
"""Which state of which layer: "conv" or "recurrent", the layer's `layer_idx`, its number there."""


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One state of one layer."""

    place: Place
    shape: tuple[int, ...]  # of a request
    dtype: torch.dtype
    prompt_dt: tuple[float | None, float | None] = (None, None)  # see `ssd_state_update`

    @property
    def num_bytes(self) -> int:
        """Of a request."""
        return math.prod(self.shape) * self.dtype.itemsize


def allocated(spec: StateSpec, num_slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[P, *shape] of zeros. Inputs of a convolution have channels beside each other in memory.

    So a kernel reads an input of many channels at once, as it does of new rows.
    """
    order = list(range(1 + len(spec.shape)))
    if spec.place[0] == "conv":
        order[-2:] = reversed(order[-2:])
    sizes = (num_slots, *spec.shape)
    return torch.empty_permuted(sizes, order, dtype=spec.dtype, device=device).zero_()


class StatePool:
    """States of requests, a slot each.

    Args:
        specs: of the model's layers, as `state_specs` finds them.
        num_requests: that have a slot at a time.
        device: where the tensors live.

    Attributes:
        tensors: by place, `allocated`, of P = 1 + num_requests slots.
    """

    def __init__(
        self, specs: Sequence[StateSpec], num_requests: int, device: torch.device | str = "cpu"
    ) -> None:
        self.specs, self.num_slots = tuple(specs), 1 + num_requests
        self.tensors = {spec.place: allocated(spec, self.num_slots, device) for spec in specs}
        for tensor in self.tensors.values():
            torch._dynamo.mark_static_address(tensor)
        self._free = list(range(num_requests, NULL_SLOT, -1))
        self._slots: dict[Hashable, int] = {}

    def by_name(self) -> dict[str, torch.Tensor]:
        """The tensors, by names that say where they are."""
        return {
            f"{kind} state {number} of layer {layer}": tensor
            for (kind, layer, number), tensor in self.tensors.items()
        }

    @property
    def num_free(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    @property
    def bytes_per_request(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_request

    def take(self, request: Hashable) -> int:
        """A slot for a request that has none. It may hold anything: the request begins anew.

        Raises:
            ValueError: the request has one, or none is free.
        """
        if request in self._slots or not self._free:
            raise ValueError(
                f"request must have no slot while one is free, got {request!r} with "
                f"{self._slots.get(request)} and {self.num_free} of {self.num_slots - 1} free"
            )
        self._slots[request] = slot = self._free.pop()
        return slot

    def slot(self, request: Hashable) -> int:
        """Of a request; the null slot if it has none."""
        return self._slots.get(request, NULL_SLOT)

    def give(self, request: Hashable) -> None:
        """Give a request's slot back, if it has one."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
