"""Triton kernels of latent attention, and their launchers."""
