"""The operators. Importing this package defines their schemas and nothing else."""

from attn_ops.ops.attention import attention
from attn_ops.ops.write_kv import write_kv

__all__ = ["attention", "write_kv"]
