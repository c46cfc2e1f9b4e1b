"""Kernels of `graphs`; imported where they are launched."""
