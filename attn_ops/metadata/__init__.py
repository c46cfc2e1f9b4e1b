"""A batch's metadata: `CommonAttentionMetadata` for all backends, `AttentionMetadata` for one."""

from attn_ops.metadata.attention import (
    METADATA_TYPE,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
)
from attn_ops.metadata.common import (
    PAD_SLOT_ID,
    CommonAttentionMetadata,
    positions_of_step,
    slots_of_step,
)

__all__ = [
    "METADATA_TYPE",
    "PAD_SLOT_ID",
    "AttentionCGSupport",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "CommonAttentionMetadata",
    "positions_of_step",
    "slots_of_step",
]
