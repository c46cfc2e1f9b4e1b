"""States of layers that keep no keys and values: a slot a request, in one tensor a layer.

P slots; slot 0 is the null slot, that of padding. With drafts of k tokens a request has 1 + k
slots. A step with a draft leaves a state behind each of its rows: that behind the last row in the
request's own slot, those behind the others in the further ones. Then `choose` makes the one its own
that has seen no rejected token.
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
    by_columns: bool = False  # in memory: what kernels sum over lies side by side

    @property
    def num_bytes(self) -> int:
        """Of a request."""
        return math.prod(self.shape) * self.dtype.itemsize


def allocated(spec: StateSpec, num_slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[P, *shape] of zeros; `by_columns` with the last two dimensions in the other order in memory.

    So a kernel reads an input of many channels of a convolution at once, as it does of new rows,
    and a warp holds whole columns of a delta rule's state, which it sums over.
    """
    order = list(range(1 + len(spec.shape)))
    if spec.by_columns:
        order[-2:] = reversed(order[-2:])
    sizes = (num_slots, *spec.shape)
    return torch.empty_permuted(sizes, order, dtype=spec.dtype, device=device).zero_()


class StatePool:
    """States of requests, a slot each, and one more for each token of a draft.

    Args:
        specs: of the model's layers, as `state_specs` finds them.
        num_requests: that have slots at a time.
        device: where the tensors live.
        num_draft_tokens: k, of a request's drafts.
        num_checkpoints: slots that are no request's, for states behind prefixes.

    Attributes:
        tensors: by place, `allocated`, of P = 1 + num_requests (1 + k) + num_checkpoints slots.
        checkpoint_slots: those of checkpoints.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_requests: int,
        device: torch.device | str = "cpu",
        num_draft_tokens: int = 0,
        num_checkpoints: int = 0,
    ) -> None:
        self.num_requests, self.num_draft_tokens = num_requests, num_draft_tokens
        each = 1 + num_draft_tokens
        first = 1 + num_requests * each
        self.checkpoint_slots = range(first, first + num_checkpoints)
        self.specs, self.num_slots = tuple(specs), first + num_checkpoints
        self.tensors = {spec.place: allocated(spec, self.num_slots, device) for spec in specs}
        for tensor in self.tensors.values():
            torch._dynamo.mark_static_address(tensor)
        firsts = range(1, first, each)
        self._free = [tuple(range(first, first + each)) for first in reversed(firsts)]
        self._slots: dict[Hashable, tuple[int, ...]] = {}

    def by_name(self) -> dict[str, torch.Tensor]:
        """The tensors, by names that say where they are."""
        return {
            f"{kind} state {number} of layer {layer}": tensor
            for (kind, layer, number), tensor in self.tensors.items()
        }

    @property
    def num_free(self) -> int:
        """Requests that may still take slots."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def bytes_per_request(self) -> int:
        return (1 + self.num_draft_tokens) * self.bytes_per_slot

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot

    def take(self, request: Hashable) -> int:
        """Slots for a request that has none; its own. They may hold anything: it begins anew.

        Raises:
            ValueError: the request has one, or none is free.
        """
        if request in self._slots or not self._free:
            raise ValueError(
                f"request must have no slot while one is free, got {request!r} with "
                f"{self._slots.get(request)} and {self.num_free} of {self.num_requests} free"
            )
        self._slots[request] = slots = self._free.pop()
        return slots[0]

    def slot(self, request: Hashable) -> int:
        """A request's own; the null slot if it has none."""
        return self.slots(request)[0]

    def slots(self, request: Hashable) -> tuple[int, ...]:
        """A request's own slot, then those for the states behind rows of a draft but the last."""
        return self._slots.get(request, (NULL_SLOT,))

    def choose(self, request: Hashable, num_rows: int) -> None:
        """After a step with a draft: the request goes on from the state behind so many rows.

        Args:
            request: that has slots.
            num_rows: from 1 to 1 + k, all of them.
        """
        own, *others = self._slots[request]
        if num_rows <= self.num_draft_tokens:
            own, others[num_rows - 1] = others[num_rows - 1], own
        self._slots[request] = (own, *others)

    @property
    def keeps_rows(self) -> bool:
        """Whether states behind single rows are kept."""
        return self.num_draft_tokens > 0 or len(self.checkpoint_slots) > 0

    def copy(self, source: int, target: int) -> None:
        """Copy the states of a slot, without a host wait."""
        tensors = self.tensors.values()
        torch._foreach_copy_([t[target] for t in tensors], [t[source] for t in tensors])

    def give(self, request: Hashable) -> None:
        """Give a request's slots back, if it has some."""
        slots = self._slots.pop(request, None)
        if slots is not None:
            self._free.append(slots)
