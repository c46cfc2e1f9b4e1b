"""Kernels of the step's metadata; imported by the first call on CUDA."""
