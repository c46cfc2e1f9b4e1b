"""Triton kernels of FLASH_ATTN; imported by its first forward over an FP8 cache."""
