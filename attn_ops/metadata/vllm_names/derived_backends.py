"""Backends derived from others, as vLLM makes them: with another builder, for fast prefill.

A fast prefill computes the logits rows of a batch alone (`attn_ops.metadata.fast_prefill`).
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from attn_ops.metadata.common import CommonAttentionMetadata
from attn_ops.metadata.fast_prefill import (
    check_last_rows,
    logits_rows_of,
    make_kv_sharing_fast_prefill_common_attn_metadata,
)

KV_SHARING_FAST_PREFILL_METADATA_FIELDS: list[tuple[str, Any, Any]] = [
    ("logits_indices_padded", torch.Tensor | None, None),
    ("num_logits_indices", int, 0),
]
"""Name, type and default of the fields that `KVSharingFastPrefillMetadata` adds."""


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """A backend's metadata that carries the logits rows as well."""

    logits_indices_padded: torch.Tensor
    num_logits_indices: int


def create_fast_prefill_custom_backend(prefix: str, underlying_attn_backend: Any) -> Any:
    """A backend named `prefix` + the given one's, its metadata reduced to the logits rows.

    Its metadata satisfies `KVSharingFastPrefillMetadata`. Backends as `subclass_attention_backend`
    takes them.

    Raises:
        ValueError: when building, if the batch lacks logits rows, or the host sees that they are
            not the last rows of their requests: attention counts positions from a sequence's end.
    """
    underlying_builder: Any = underlying_attn_backend.get_builder_cls()

    class FastPrefillAttentionBuilder(underlying_builder):
        """Builds the underlying metadata from the reduced batch."""

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            padded, count = logits_rows_of(common_attn_metadata)
            check_last_rows(common_attn_metadata, padded, count)
            reduced = make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata)
            metadata = copy.copy(super().build(common_prefix_len, reduced, fast_build))
            # Past __setattr__: a metadata of another project may be a frozen dataclass.
            object.__setattr__(metadata, "logits_indices_padded", padded)
            object.__setattr__(metadata, "num_logits_indices", count)
            return metadata

    return subclass_attention_backend(prefix, underlying_attn_backend, FastPrefillAttentionBuilder)


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: Any, builder_cls: type
) -> Any:
    """A backend like the given one whose metadata `builder_cls` builds.

    Args:
        name_prefix: put before the name.
        attention_backend_cls: an `attn_ops.Backend`, or a class with `get_builder_cls`.
        builder_cls: what `get_builder_cls()` of the result returns.
    """
    if isinstance(attention_backend_cls, type):
        name = name_prefix + attention_backend_cls.__name__
        members = {"get_builder_cls": staticmethod(lambda: builder_cls)}
        return type(name, (attention_backend_cls,), members)
    name = name_prefix + attention_backend_cls.name
    return dataclasses.replace(attention_backend_cls, name=name, builder=builder_cls)


def subclass_attention_metadata(
    name_prefix: str, metadata_cls: Any, fields: Sequence[tuple[str, Any, Any]]
) -> Any:
    """A dataclass derived from `metadata_cls` with more fields, each (name, type, default).

    A frozen dataclass gives a frozen one. Defaults must be immutable, as in any dataclass.
    """
    params = getattr(metadata_cls, "__dataclass_params__", None)
    members = [(name, kind, dataclasses.field(default=value)) for name, kind, value in fields]
    return dataclasses.make_dataclass(
        name_prefix + metadata_cls.__name__,
        members,
        bases=(metadata_cls,),
        frozen=params.frozen if params else False,
    )
