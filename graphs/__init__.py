"""Decode sessions, CUDA-graph capture, dumps and the command line.

A public name is imported when it is first used: `attn-ops` checks its arguments without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphs.async_session import AsyncSession
    from graphs.capture.dispatch import CudagraphDispatcher
    from graphs.capture.failures import CaptureError
    from graphs.capture.verifier import VerificationError, Verifier
    from graphs.dumps.dump import dump
    from graphs.modes import BatchDescriptor, CUDAGraphMode
    from graphs.options import SessionOptions
    from graphs.requests.results import RequestError
    from graphs.requests.scores import Score
    from graphs.sampling import SamplingParams
    from graphs.session import DecodeSession, Generation, StepOutput
    from graphs.step.ranks import follow, lead

__all__ = [
    "AsyncSession",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CaptureError",
    "CudagraphDispatcher",
    "DecodeSession",
    "Generation",
    "RequestError",
    "SamplingParams",
    "Score",
    "SessionOptions",
    "StepOutput",
    "VerificationError",
    "Verifier",
    "dump",
    "follow",
    "lead",
]

_MODULES = {
    "AsyncSession": "async_session",
    "BatchDescriptor": "modes",
    "CUDAGraphMode": "modes",
    "CaptureError": "capture.failures",
    "CudagraphDispatcher": "capture.dispatch",
    "DecodeSession": "session",
    "Generation": "session",
    "RequestError": "requests.results",
    "SamplingParams": "sampling",
    "Score": "requests.scores",
    "SessionOptions": "options",
    "StepOutput": "session",
    "VerificationError": "capture.verifier",
    "Verifier": "capture.verifier",
    "dump": "dumps.dump",
    "follow": "step.ranks",
    "lead": "step.ranks",
}
"""Where a public name is."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
