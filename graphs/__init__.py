"""Decode sessions, CUDA-graph capture, dumps and the command line."""

from graphs.capture.dispatch import CudagraphDispatcher
from graphs.capture.failures import CaptureError
from graphs.dump.dump import dump
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.options import SessionOptions
from graphs.sampling import SamplingParams
from graphs.session import DecodeSession, Generation, StepOutput
from graphs.verify.verifier import VerificationError, Verifier

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "CaptureError",
    "CudagraphDispatcher",
    "DecodeSession",
    "Generation",
    "SamplingParams",
    "SessionOptions",
    "StepOutput",
    "VerificationError",
    "Verifier",
    "dump",
]
