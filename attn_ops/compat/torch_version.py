"""The torch that runs, to compare with."""

import torch

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""Such as (2, 11)."""
