"""What Triton kernels and their launchers need: to be launched early, and with little on the host.

A kernel that is launched early must call `wait_for_inputs` before it reads what another kernel of
the step writes, and before it writes. Before that it may read weights and scales alone, which no
kernel of a step writes. tests/attn_ops/early_launch holds every kernel to that.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_ops.early_launch import is_in_turn, why_not_early


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before have ended; then the next one may be set up.

    Not the other way round: a kernel that starts may count on all but its direct predecessor.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_EARLY: dict[str, Any] = {"PDL": True, "launch_pdl": True}
_IN_TURN: dict[str, Any] = {"PDL": False}


def early_launch(device: torch.device) -> dict[str, Any]:
    """The keyword arguments of a launch that say so, the constant PDL among them; read only."""
    return _EARLY if _launches_early(device) and not is_in_turn() else _IN_TURN


# Cached: a property of the device, asked by each launch.
@functools.cache
def _launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and not knobs.runtime.interpret and why_not_early(device) is None


_COMPILED: dict[tuple, tuple[CompiledKernel, tuple]] = {}
"""Global, as Triton's own: what it found for a kernel and arguments that compile alike, and the
constants in the order of the kernel's arguments."""


def is_rehearsal() -> bool:
    """Whether kernels are compiled and do not run: what they would write is not defined."""
    return isinstance(active_mode.get(), _Rehearsal)


class _Rehearsal(triton.AsyncCompileMode):
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self.seen: set[tuple] = set()

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
        device = torch.cuda.current_device()  # of this thread

        def compile_and_load() -> Any:
            kernel = compile_fn()
            with torch.cuda.device(device), contextlib.suppress(Exception):  # a launch says it
                kernel.run  # noqa: B018  # compiles Triton's launcher of it, in C, and loads both
            return kernel

        return super().submit(key, compile_and_load, finalize_fn)


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Kernels launched by `quick` do not run inside the block; at its end all are compiled.

    Side by side, as Triton and its assembler let threads run. One that does not compile says so
    when it is launched.
    """
    with ThreadPoolExecutor() as pool, _Rehearsal(pool):
        yield


def quick(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]`, which asks Triton for the compiled kernel once.

    Triton binds, specializes and hashes all arguments by name in each launch. Give what is no
    constant by position, a tensor first, and constants by name.
    """

    def launch(*args: Any, **constants: Any) -> None:
        alike = (
            id(kernel),
            args[0].get_device(),
            *map(_alike, args),
            *constants,
            *constants.values(),
        )
        if isinstance(mode := active_mode.get(), _Rehearsal):
            if alike not in mode.seen:
                mode.seen.add(alike)
                kernel.warmup(*args, grid=grid, **constants)
            return
        known = _COMPILED.get(alike)
        if known is not None:
            _launch(known[0], (*grid, 1, 1)[:3], (*args, *known[1]))
            return
        compiled = kernel[grid](*args, **constants)
        if isinstance(compiled, CompiledKernel):  # the interpreter has none
            rest = kernel.params[len(args) :]
            if all(one.is_constexpr and one.name in constants for one in rest):
                _COMPILED[alike] = compiled, tuple(constants[one.name] for one in rest)

    return launch


def _launch(compiled: Any, grid: tuple[int, ...], args: tuple) -> None:
    """`compiled[grid](*args)`, on the device of the first one, which is current.

    Triton makes metadata for a profiler's hooks in every launch. Here none is made without hooks.
    """
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(before, "calls", before) or getattr(after, "calls", after):
        compiled[grid](*args)
        return
    stream = driver.active.get_current_stream(args[0].get_device())
    known = compiled.function, compiled.packed_metadata
    compiled.run(*grid, stream, *known, None, None, None, *args)


def _alike(x: Any) -> Any:
    """What a kernel is compiled for: equal for arguments that Triton compiles alike."""
    kind = type(x)
    if kind is int:
        return (x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63)
    if kind is float:
        return float
    if isinstance(x, torch.Tensor):
        return (x.dtype, x.data_ptr() % 16 == 0)
    if kind is TensorDescriptor:
        rest = (v for name, v in vars(x).items() if name not in _OF_A_LAUNCH)
        return (x.base.dtype, *x.block_shape, *rest)
    return tuple(map(_alike, x)) if kind is tuple else x


_OF_A_LAUNCH = ("base", "shape", "strides", "block_shape")
"""Of a descriptor: not compiled for, but for the last one, which is a list."""
