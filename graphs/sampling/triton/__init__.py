"""Kernels of sampling; imported by the first call on CUDA."""
