"""`torch.compile(model, backend="attn_ops")`: our passes, then Inductor.

Dynamo graph --run_dynamo_stage--> --compile_regions--> AOTAutograd --AtenPipeline--> Inductor
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.ir import ConcatKernel
from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from attn_ops._compat import TORCH_VERSION
from fx_passes.config import PassConfig
from fx_passes.observe import recorders
from fx_passes.pipeline import SLOT, run_dynamo_stage, with_user_pass
from fx_passes.regions import compile_regions


def attn_ops(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The torch.compile backend.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its inputs.
        options: switches of `PassConfig` and any option of `torch._inductor.config`.
        mode: a mode of Inductor (`torch._inductor.list_mode_options`).

    Raises:
        ValueError: an unknown option or mode, or a value that an option does not take.
    """
    config, inductor_options = PassConfig.split(options)
    patches = {**_mode_options(mode), **inductor_options}
    patches[SLOT] = with_user_pass(config, patches.get(SLOT, getattr(inductor_config, SLOT)))
    for recorder in recorders():
        recorder.num_graphs += 1
    run_dynamo_stage(gm, config)

    def compile_piece(piece: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return cast(Callable[..., Any], compile_fx(piece, inputs, config_patches=patches))

    # AOTAutograd's own cache would skip our passes and with them their counts; Inductor's
    # cache behind it stays on.
    no_cache = functorch_config.patch(enable_autograd_cache=False)
    with no_cache, _cat_without_guards(), _empty_grids():
        return compile_regions(gm, example_inputs, compile_piece)


@contextlib.contextmanager
def _cat_without_guards() -> Iterator[None]:
    """On torch before 2.13, let no `cat`, which RoPE uses, guard on more than one token.

    The first decode step of a batch of one would compile the model again. There are two such
    guards: Inductor's decomposition of `cat((x, x))` flattens an expanded view, and its
    lowering asks whether arguments of four dimensions lie channels last (Gemma 3n, Gemma 4). The
    answers only choose a layout, and the one found for many tokens is right for one.

    The decomposition's entry is changed in place for the time of our compilation, because a table
    of one's own becomes part of Inductor's cache key and cannot be pickled: nothing would be
    cached.
    """
    table, cat = select_decomp_table(), torch.ops.aten.cat.default
    decompose = table.get(cat)
    if TORCH_VERSION >= (2, 13) or decompose is None:
        yield
        return
    create: Any = ConcatKernel.create

    def cat_unless_repeated(tensors: list[torch.Tensor], dim: int = 0) -> Any:
        if len(tensors) > 1 and all(t is tensors[0] for t in tensors):
            return NotImplemented
        return decompose(tensors, dim)

    def create_without_guards(inputs: Sequence[Any], dim: int) -> Any:
        with V.graph.sizevars.shape_env.suppress_guards():
            return create(inputs, dim)

    table[cat] = cat_unless_repeated
    ConcatKernel.create = staticmethod(create_without_guards)  # pyright: ignore
    try:
        yield
    finally:
        table[cat] = decompose
        ConcatKernel.create = create


@contextlib.contextmanager
def _empty_grids() -> Iterator[None]:
    """On torch before 2.13, let kernels be launched for no rows: chunks of a prompt want no logits.

    Their launchers divide by the number of blocks; later versions ask for zero first.
    """
    generate = Grid2DWithYZOverflow.generate
    if TORCH_VERSION >= (2, 13):
        yield
        return

    def generate_for_any(self: Any, meta: dict[str, int]) -> None:
        generate(self, meta)
        if self.mode == "python":
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    Grid2DWithYZOverflow.generate = generate_for_any
    try:
        yield
    finally:
        Grid2DWithYZOverflow.generate = generate


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise ValueError(
            f"mode must be known to Inductor, got {mode!r}; supported: default, {', '.join(known)}"
        )
    return dict(known[mode])


def options(config: PassConfig | None = None) -> dict[str, Any]:
    """Options for plain Inductor: `torch.compile(model, options=fx_passes.options())`.

    They run our `aten` passes. Passes on the Dynamo graph (`outline_layers`) need the backend;
    Inductor has no slot for them.
    """
    return {SLOT: with_user_pass(config or PassConfig(), getattr(inductor_config, SLOT))}


def start_compile_workers() -> None:
    """Start Inductor's compile processes, so that they are ready when Dynamo has traced the model.

    Kernels of the first graph are otherwise compiled one by one in this process: 4.6 of 20.5 s for
    the Llama-3-8B shape (H200, torch 2.11, 2026-11-20). Returns at once; does nothing where
    Inductor uses no processes.
    """
    maybe_warm_pool()
    AsyncCompile.use_process_pool()
