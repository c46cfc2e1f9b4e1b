"""States behind prefixes of prompts: where a request may begin that finds its first blocks.

A block of keys serves every prompt that begins with its tokens; a state is that of one length. So
some are kept: behind the last full block before a prompt's last token, and where a prompt leaves
what the cache held when it was admitted, as others may leave it there too. A step writes them, as
it computes those rows. The one that was not used for the longest time makes room.
"""

from collections.abc import Hashable, Sequence

from attn_ops.prefixes import Key
from attn_ops.states import StatePool
from graphs.requests.requests import Request


class Checkpoints:
    """Finds and keeps states behind prefixes.

    Args:
        states: whose slots for checkpoints these are.
    """

    def __init__(self, states: StatePool) -> None:
        self._states, self._free = states, list(states.checkpoint_slots)
        self._slots: dict[Key, int] = {}  # by the last block's key, the latest use last
        self._planned: dict[Key, tuple[int, int]] = {}  # a request, and blocks of its prompt
        self.num_evicted = 0

    @property
    def num_kept(self) -> int:
        return len(self._slots)

    @property
    def num_planned(self) -> int:
        """Slots that running requests have."""
        return len(self._states.checkpoint_slots) - len(self._free) - len(self._slots)

    def find(self, keys: Sequence[Key]) -> int:
        """The most of a prompt's blocks, by their keys, behind which a state is kept."""
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._slots), 0)

    def use(self, request: Hashable, key: Key) -> None:
        """Copy the state behind a block into the slot of a request, which goes on from there."""
        self._slots[key] = slot = self._slots.pop(key)
        self._states.copy(slot, self._states.slot(request))

    def plan(self, request: Request, keys: Sequence[Key], num_blocks: int, block_size: int) -> None:
        """Let the step that computes so many blocks of a request's prompt keep the state then."""
        key = keys[num_blocks - 1]
        if key in self._slots or key in self._planned:
            return
        slot = self._taken()
        if slot is not None:
            self._planned[key] = request.id, num_blocks
            request.checkpoints[num_blocks * block_size] = key, slot

    def awaits(self, request: Request, keys: Sequence[Key], num_blocks: int) -> bool:
        """Whether an older request is about to keep a state behind more blocks of this one's."""
        return any(
            owner < request.id and num_blocks < number <= len(keys) and keys[number - 1] == key
            for key, (owner, number) in self._planned.items()
        )

    def keep(self, request: Request, num_computed: int) -> None:
        """From here on others find the states of a request behind so many tokens."""
        for number in [number for number in request.checkpoints if number <= num_computed]:
            key, self._slots[key] = request.checkpoints.pop(number)
            del self._planned[key]

    def drop(self, request: Request) -> None:
        """A request will compute nothing of what was planned."""
        for key, slot in request.checkpoints.values():
            if self._planned.get(key, (None, 0))[0] == request.id:  # it was not forgotten
                del self._planned[key]
            self._free.append(slot)
        request.checkpoints.clear()

    def forget(self) -> None:
        """Find nothing of what was kept so far, and wait for nothing that was planned."""
        self._free += self._slots.values()
        self._slots.clear()
        self._planned.clear()

    def _taken(self) -> int | None:
        """A slot, of what was not used for the longest time if need be; None: all are planned."""
        if not self._free and self._slots:
            self._free.append(self._slots.pop(next(iter(self._slots))))
            self.num_evicted += 1
        return self._free.pop() if self._free else None
