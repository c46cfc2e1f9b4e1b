"""Makes attn_ops known to Transformers."""

from attn_ops.integrations.fp8_experts import fp8_experts
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
    _register_experts()


def _register_experts() -> None:
    """Of `experts_implementation="attn_ops"` experts in FP8 are ours.

    Others are "grouped_mm", which the pass `experts` replaces.
    """
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # an older one has no such choice
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, ALL_EXPERTS_FUNCTIONS["grouped_mm"])
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts)
