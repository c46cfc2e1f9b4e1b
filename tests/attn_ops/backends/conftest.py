"""What tests of kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def uninitialized_memory_is_nan() -> Iterator[None]:
    """`torch.empty` fills with NaN in deterministic mode: a row that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
