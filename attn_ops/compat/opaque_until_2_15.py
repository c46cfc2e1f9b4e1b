"""Opaque graph inputs under the names of torch 2.11 to 2.14; torch 2.15 renamed them.

Torch 2.11 to 2.14 need it. It can go when pyproject.toml asks for 2.15: `register_opaque_reference`
then calls `register_custom_class` alone.
"""

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


def register_opaque_reference(cls: type) -> str:
    """Register `cls` as an opaque graph input and return its name for operator schemas.

    Dynamo treats an instance as a black box: it is an input of the graph and no
    attribute of it is guarded on.
    """
    register_custom_class(cls, typ=_SYMBOLIC)
    return f"{cls.__module__}.{cls.__qualname__}"


__all__ = ["OpaqueBase", "register_opaque_reference"]
