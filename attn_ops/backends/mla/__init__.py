"""Backends of latent attention (MLA): one latent a token in the cache, two ways to attend to it.

Each is a `Backend` with `Support(latent=True)`; its `forward` takes q [T, N, P + R], a cache
[P, B, Lkv + R] and `LatentOptions`, and gives [T, N, V]. docs/backends.md explains both ways.
"""
