"""Triton kernels that quantize attention's output."""
