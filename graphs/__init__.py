"""Decode sessions, CUDA-graph capture, dumps and the command line."""

from graphs.dump import dump
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.session import DecodeSession, Generation, StepOutput

__all__ = ["BatchDescriptor", "CUDAGraphMode", "DecodeSession", "Generation", "StepOutput", "dump"]
