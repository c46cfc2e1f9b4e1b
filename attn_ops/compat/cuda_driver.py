"""Calls of the CUDA driver that no version of torch offers."""

import ctypes
import functools
import sys
from enum import IntEnum
from typing import Any


class Status(IntEnum):
    """What a stream does, in the driver's numbers."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


class Driver:
    """Streams are handles."""

    def __init__(self) -> None:
        self._cuda: Any = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")

    def status(self, stream: int) -> Status:
        """Whether the stream is capturing; `torch.cuda` cannot tell a capture that is invalid."""
        value = ctypes.c_int()
        self._call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(value))
        return Status(value.value)

    def begin(self, stream: int) -> None:
        """Begin a capture that minds its own thread only."""
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(1))

    def end(self, stream: int) -> None:
        """End a capture, valid or not; what it recorded is dropped."""
        graph = ctypes.c_void_p()
        self._cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            self._call("cuGraphDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} of the CUDA driver returned {code}")


# Cached: the library is loaded once.
@functools.cache
def driver() -> Driver:
    """The driver, loaded when it is first needed: there is none on a machine without a GPU."""
    return Driver()
