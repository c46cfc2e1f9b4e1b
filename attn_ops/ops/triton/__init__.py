"""Kernels of the operators; imported by the first call on CUDA."""
