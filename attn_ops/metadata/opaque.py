"""What torch may do with a batch's metadata: trace with a copy, and leave it out of cache keys."""

import copy
from typing import Any

from attn_ops.compat.opaque_until_2_15 import OpaqueBase


class OfABatch(OpaqueBase):  # pyright: ignore[reportGeneralTypeIssues]
    """A graph input that is another object in each batch, and on which nothing compiled depends.

    Inductor pickles it for the key of its cache, without looking for circles; a key with the batch
    in it would be found for no other. A subclass has `replace`, which makes a copy.

    Raises:
        TypeError: it is loaded from a pickle.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (type(self).__name__,)

    def __copy__(self) -> Any:
        return self.replace()  # pyright: ignore[reportAttributeAccessIssue]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """What torch traces with, so that nothing is found for the batch itself."""
        found = memo[id(self)] = copy.copy(self)
        found.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return found


def _load(name: str) -> None:
    raise TypeError(f"{name} cannot be loaded: it belongs to its batch; build another")
