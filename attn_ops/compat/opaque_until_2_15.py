"""Opaque graph inputs under the names of torch 2.11 to 2.14; torch 2.15 renamed them.

Torch 2.11 to 2.14 need it. It can go when pyproject.toml asks for 2.15: `register_opaque_reference`
then calls `register_custom_class` alone.
"""

import copy
from typing import Any

try:  # torch 2.15 and later, where the old names warn
    from torch._custom_class_base import (  # pyright: ignore[reportMissingImports]
        CustomClassBase as OpaqueBase,
    )
    from torch._library.opaque_object import (
        register_custom_class,  # pyright: ignore[reportAttributeAccessIssue]
    )

    _SYMBOLIC = "symbolic"
except ImportError:  # torch 2.11 to 2.14
    from torch._library.opaque_object import register_opaque_type as register_custom_class
    from torch._opaque_base import OpaqueBase

    _SYMBOLIC = "reference"


class OfABatch(OpaqueBase):  # pyright: ignore[reportGeneralTypeIssues]
    """An input that is another object in each batch, and on which nothing compiled depends.

    Inductor pickles it for the key of its cache, without looking for circles; a key with the batch
    in it would be found for no other. A subclass has `replace`, which makes a copy.
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


def register_opaque_reference(cls: type) -> str:
    """Register `cls` as an opaque graph input and return its name for operator schemas.

    Dynamo treats an instance as a black box: it is an input of the graph and no
    attribute of it is guarded on.
    """
    register_custom_class(cls, typ=_SYMBOLIC)
    return f"{cls.__module__}.{cls.__qualname__}"


__all__ = ["OfABatch", "register_opaque_reference"]
