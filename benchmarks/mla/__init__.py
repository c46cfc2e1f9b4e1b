"""Latent attention: kernels, libraries and operators beside each other."""
