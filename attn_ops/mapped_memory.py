"""`MappedMemory`: memory that can be given back and taken again at the same address.

A CUDA graph knows addresses, so a cache that another program needs the memory of in between must
come back where it was. On a GPU the address is reserved once, and memory is mapped there and
unmapped (CUDA's virtual memory, through cuda-bindings, which torch brings along). On a CPU the
system takes the pages of a private mapping back.
"""

import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch


class MappedMemory:
    """Bytes, zero at first and after every `map`.

    Args:
        num_bytes: how many.
        device: "cpu" or a GPU.

    Raises:
        ValueError: on a GPU without cuda-bindings.
        torch.OutOfMemoryError: the GPU has too little left.
    """

    ALIGNMENT = 512
    """Bytes that a tensor's begin is a multiple of, as torch's allocator has it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        kind = _OfGPU if device.type == "cuda" else _OfCPU
        self._memory: Any = kind(num_bytes, device)
        self.is_mapped = True
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in it, behind those that were made before; a storage of its own.

        It must not be touched while nothing is mapped. Compiled code takes tensors of one storage
        for aliases of each other.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        found = torch.empty(0, dtype=dtype, device=self._memory.device)
        storage = self._memory.bytes_at(self._used, num_bytes).untyped_storage()
        self._used += -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        return found.set_(storage, 0, tuple(shape))  # type: ignore[arg-type]

    def unmap(self) -> None:
        """Give the memory back, on a GPU after what was launched; harmless if repeated."""
        if self.is_mapped:
            self._memory.unmap()
            self.is_mapped = False

    def map(self) -> None:
        """Take memory again.

        Raises:
            torch.OutOfMemoryError: the GPU has too little left; nothing is mapped.
        """
        if not self.is_mapped:
            self._memory.map()
            self.is_mapped = True


class _OfCPU:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, max(num_bytes, 1), flags)

    def bytes_at(self, begin: int, number: int) -> torch.Tensor:
        return torch.frombuffer(self._pages, dtype=torch.uint8, offset=begin, count=number)

    def unmap(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)  # pages of zeros come when they are touched

    def map(self) -> None:
        pass


class _OfGPU:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            from cuda.bindings import driver  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError(
                "can_sleep must be False where cuda-bindings is not installed, got True"
            ) from None
        self._driver, self.device = driver, torch.device(device.type, device.index or 0)
        torch.zeros(1, device=device)  # makes the context
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = self.device.index
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = _value(driver.cuMemGetAllocationGranularity(self._properties, flag))
        self._size = -(-max(num_bytes, 1) // step) * step
        self._address = _value(driver.cuMemAddressReserve(self._size, 0, 0, 0))
        self._mapped = [False]
        released = weakref.finalize(self, _release, driver, self._address, self._size, self._mapped)
        released.atexit = False  # the process gives everything back
        self.map()

    def bytes_at(self, begin: int, number: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(self, int(self._address) + begin, number), device=self.device)

    def map(self) -> None:
        driver = self._driver
        torch.cuda.empty_cache()  # what torch's allocator keeps for later is not free
        error, handle = driver.cuMemCreate(self._size, self._properties, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise torch.OutOfMemoryError(
                f"a cache of {self._size:,} bytes must fit into what {self.device} has left, got "
                f"{free:,} bytes"
            )
        _value((error,))
        try:
            _value(driver.cuMemMap(self._address, self._size, 0, handle, 0))
            access = driver.CUmemAccessDesc()
            access.location = self._properties.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _value(driver.cuMemSetAccess(self._address, self._size, [access], 1))
        finally:
            _value(driver.cuMemRelease(handle))  # the mapping keeps the memory
        self._mapped[0] = True
        _value(driver.cuMemsetD8(self._address, 0, self._size))
        torch.cuda.synchronize(self.device)  # no stream of torch's waits for the driver's own

    def unmap(self) -> None:
        torch.cuda.synchronize(self.device)
        self._mapped[0] = False
        _value(self._driver.cuMemUnmap(self._address, self._size))


class _Bytes:
    """Numba's interface to memory, which torch takes; its tensor keeps the memory alive."""

    def __init__(self, memory: _OfGPU, address: int, number: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (number,), "typestr": "|u1", "version": 3, "strides": None,
            "data": (address, False),
        }  # fmt: skip


def _release(driver: Any, address: Any, size: int, mapped: list[bool]) -> None:
    """When nobody has the memory any longer."""
    if mapped[0]:
        torch.cuda.synchronize()
        driver.cuMemUnmap(address, size)
    driver.cuMemAddressFree(address, size)


def _value(returned: tuple[Any, ...]) -> Any:
    """The driver's result, or a RuntimeError of its error."""
    error, *values = returned
    if int(error):
        raise RuntimeError(f"CUDA's virtual memory failed: {error!r}")
    return values[0] if values else None
