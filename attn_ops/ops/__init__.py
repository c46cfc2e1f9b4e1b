"""The operators. Importing this package defines their schemas and nothing else."""

from attn_ops.ops.attention import attention, attention_with_lse
from attn_ops.ops.write_kv import write_kv

__all__ = ["attention", "attention_with_lse", "write_kv"]
