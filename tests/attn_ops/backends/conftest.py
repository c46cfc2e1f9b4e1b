"""What tests of kernels, and of backends over libraries, share."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def uninitialized_memory_is_nan() -> Iterator[None]:
    """`torch.empty` fills with NaN in deterministic mode: a row that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def reason_against(monkeypatch) -> Callable[..., str | None]:
    """Why a module's backend is unavailable on a GPU, its library of some version or missing."""

    def reason(module, installed: str | None, found: str | None) -> str | None:
        def version(name):
            if installed is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(module, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        return module.unavailable.__wrapped__()

    return reason
