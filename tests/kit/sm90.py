"""Our Triton kernels compiled for Hopper where there is no GPU: as launchers call them, to PTX.

Only in a process without TRITON_INTERPRET: there `@triton.jit` makes no kernels.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attn_ops.early_launch.triton import launch


class Hopper:
    """What Triton asks of a driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def without_binary() -> contextlib.AbstractContextManager:
    """Kernels are compiled to PTX, not for a GPU."""
    stages = CUDABackend.add_stages

    def add_stages(self: Any, made: dict[str, Any], *args: Any) -> None:
        stages(self, made, *args)
        made["cubin"] = lambda source, metadata: b""

    return mock.patch.object(CUDABackend, "add_stages", add_stages)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel of a launch."""

    name: str  # attn_ops.ops.triton.skinny.skinny_kernel
    ptx: str
    pointers: dict[int, str]  # parameters that are addresses, by place
    launched_early: bool
    constants_alone_by_name: bool  # so that `quick` may keep it


@contextlib.contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Launches inside the block compile and do not run; tensors are on the CPU."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        pointers = _pointers(kernel.src)
        early = bool(kwargs.get("launch_pdl"))
        rest = all(parameter.is_constexpr for parameter in self.params[len(args) :])
        # None: a launcher that kept the kernel would launch it the next time.
        found.append(Compiled(name, kernel.asm["ptx"], pointers, early, rest))

    with (
        mock.patch.object(driver, "_active", Hopper(), create=True),
        mock.patch.object(JITFunction, "run", compile_only),
        without_binary(),
        mock.patch.object(launch, "_launches_early", return_value=True),
        mock.patch.object(torch.cuda, "device_of", return_value=contextlib.nullcontext()),
        triton.knobs.compilation.scope(),
    ):
        triton.knobs.compilation.always_compile = True  # what has no binary must not be cached
        yield found


def _pointers(source: Any) -> dict[int, str]:
    """Places and names of the parameters that are addresses."""
    found: dict[int, str] = {}
    place = 0

    def add(name: str, kind: Any) -> None:
        nonlocal place
        if isinstance(kind, tuple):
            for i, one in enumerate(kind):
                add(f"{name}.{i}", one)
        elif kind != "constexpr":
            if kind[0] == "*" or kind.startswith("tensordesc"):
                found[place] = name
            place += 1

    for name, kind in source.signature.items():
        add(name, kind)
    return found
