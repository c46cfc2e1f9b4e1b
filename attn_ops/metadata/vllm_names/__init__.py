"""Names of vLLM that callers outside this project use; nothing of ours calls them but by vLLM's.

`attn_ops.metadata` exports them all. docs/metadata.md says where they differ from vLLM's.
"""
