"""Decode sessions, CUDA-graph capture, dumps and the command line."""

from graphs.dispatch import CudagraphDispatcher
from graphs.dump import dump
from graphs.failures import CaptureError
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.sampling import SamplingParams
from graphs.session import DecodeSession, Generation, StepOutput
from graphs.verify import VerificationError, Verifier

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "CaptureError",
    "CudagraphDispatcher",
    "DecodeSession",
    "Generation",
    "SamplingParams",
    "StepOutput",
    "VerificationError",
    "Verifier",
    "dump",
]
