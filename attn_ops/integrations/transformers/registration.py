"""Makes attn_ops known to Transformers."""

from attn_ops.integrations.transformers.experts import register_experts
from attn_ops.integrations.transformers.forward import attention_forward, no_mask
from attn_ops.integrations.transformers.layers import NAME
from attn_ops.integrations.transformers.own_attention import register_classes


def register() -> None:
    """Make "attn_ops" known to Transformers, of attention and experts; harmless if repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)
    register_classes()
    register_experts()
