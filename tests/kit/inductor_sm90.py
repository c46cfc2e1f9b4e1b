"""The kernels that Inductor writes for a Hopper GPU, where there is none: sources and PTX.

Only in a process of its own: much of torch is made to believe in the GPU, and remembers.
"""

import ast
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import triton
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from tests.kit.sm90 import Hopper, without_binary

HEADER = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


class Properties:
    """Of an H200."""

    major, minor, name, gcnArchName = 9, 0, "H200", ""
    multi_processor_count, warp_size, regs_per_multiprocessor = 132, 32, 65536
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448
    total_memory, L2_cache_size = 140 << 30, 50 << 20


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Torch finds one H200 inside the block."""
    interface = "torch._dynamo.device_interface.CudaInterface"
    answers = {
        "torch.cuda._lazy_init": None,
        "torch._subclasses.fake_tensor.init_gpu_context": None,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.get_device_properties": Properties(),
        "torch.cuda.current_device": 0,
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.utils._triton.has_triton": True,
        f"{interface}.is_available": True,
        f"{interface}.get_compute_capability": 90,
        f"{interface}.get_device_properties": Properties(),
        f"{interface}.Worker.get_device_properties": Properties(),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", Hopper(), create=True))
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, mock.Mock(return_value=answer)))
        yield


def written(function: Callable[..., Any], *shapes: tuple[int, ...], **config: Any) -> str:
    """What Inductor writes for `function` of float32 tensors; inside `hopper`."""
    with FakeTensorMode() as fake_mode:
        inputs = [torch.empty(shape, device="cuda") for shape in shapes]
        gm = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    lowering = GraphLowering(gm, example_inputs=inputs, is_inference=True)
    with (
        inductor_config.patch({"triton.enable_pdl": True, **config}),
        V.set_fake_mode(fake_mode),
        V.set_graph_handler(lowering),
        V.set_extern_kernel_nodes([]),
        V.set_debug_handler(DebugContext()),
    ):
        lowering.run(*inputs)
        return lowering.codegen()[0].value


def kernels(code: str) -> dict[str, str]:
    """Sources of the kernels of a module that Inductor wrote, by name."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    made = [c for c in calls if ast.unparse(c.func) == "async_compile.triton"]
    return {ast.literal_eval(c.args[0]): ast.literal_eval(c.args[1]) for c in made}


def ptx_of(source: str) -> tuple[str, dict[int, str]]:
    """PTX of one kernel, and the names of its parameters that are addresses, by place."""
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
    heuristics = next(d for d in function.decorator_list if isinstance(d, ast.Call))
    meta = next(k.value for k in heuristics.keywords if k.arg == "triton_meta")
    signature = next(
        ast.literal_eval(v) for k, v in zip(meta.keys, meta.values, strict=True)
        if ast.literal_eval(k) == "signature"
    )  # fmt: skip
    function.decorator_list = []
    text = f"{HEADER}\n@triton.jit\n{ast.unparse(function)}\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{function.name}.py"
        path.write_text(text)
        spec = spec_from_file_location(function.name, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        constants = {name: 64 for name, kind in signature.items() if kind == "constexpr"}
        kernel = ASTSource(getattr(module, function.name), signature, constants)
        with without_binary():
            compiled = triton.compile(kernel, target=GPUTarget("cuda", 90, 32))
    arguments = [name for name, kind in signature.items() if kind != "constexpr"]
    pointers = {i: n for i, n in enumerate(arguments) if signature[n].startswith("*")}
    return compiled.asm["ptx"], pointers
