"""`torch.compile(model, backend="attn_ops")`: our passes, then Inductor.

Dynamo graph --run_dynamo_stage--> --compile_regions--> AOTAutograd --AtenPipeline--> Inductor
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch._inductor.config as inductor_config
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from attn_ops.compat.inductor_until_2_13 import inductor_mended
from attn_ops.compat.stride_order_until_2_16 import strides_ordered_without_guards
from fx_passes.config import PassConfig
from fx_passes.early_launch import early_launch_of
from fx_passes.forms import config_of_replays, copied, with_forms
from fx_passes.inductor_slot import SLOT, AtenPipeline, with_user_pass
from fx_passes.kept import autograd_cache
from fx_passes.naming import GraphName
from fx_passes.observe import recorders
from fx_passes.pipeline import run_dynamo_stage
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
    pipeline = with_user_pass(config, patches.get(SLOT, getattr(inductor_config, SLOT)))
    early = early_launch_of(config, patches, example_inputs)
    patches |= early.patches
    for recorder in recorders():
        recorder.num_graphs += 1
        recorder.early_launch = early.why
    undo = run_dynamo_stage(gm, config)

    keeper = next((r.keeper for r in recorders() if r.keeper is not None), None)
    pieces: list[Callable[..., Any]] = []
    in_replays = config_of_replays(config, example_inputs)

    def compile_piece(
        piece: GraphModule, inputs: Sequence[Any], name: GraphName | None
    ) -> Callable[..., Any]:
        own = pipeline.named(name, f"{'' if keeper is None else keeper.nonce}{early}")
        again = None if in_replays is None else SecondForm(piece, own.of_replays(in_replays))
        called = compile_fx(piece, inputs, config_patches={**patches, SLOT: own})
        other = None if again is None else again.compiled(inputs, patches)
        pieces.append(with_forms(cast(Callable[..., Any], called), other))
        return pieces[-1]

    with (
        autograd_cache(keeper),
        inductor_mended(),
        strides_ordered_without_guards(),
        early.compiling(),
    ):
        try:
            compiled = compile_regions(gm, example_inputs, compile_piece)
            if keeper is not None:
                keeper.keep(gm, pieces, whole=compiled in pieces)
            return early.called(compiled)
        except BaseException:
            undo()  # whose graph it is may compile it by other means
            raise


class SecondForm:
    """What the second form of a piece is compiled from, as it is before the first one is.

    Args:
        piece: the graph. It is copied, and so is the context in which it was traced, where
            AOTAutograd keeps state.
        pipeline: of the second form.
    """

    def __init__(self, piece: GraphModule, pipeline: AtenPipeline) -> None:
        self._piece, self._pipeline = copied(piece), pipeline
        self._context = copy.copy(TracingContext.get())

    def compiled(
        self, inputs: Sequence[Any], patches: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """None where it would be the first form."""
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
        combined = {"combo_kernels": True} if on_gpu else {}
        options = {**combined, **patches, SLOT: self._pipeline}
        try:
            with tracing(self._context):
                found = compile_fx(self._piece, inputs, config_patches=options)
        except Exception:
            if self._pipeline.is_needless:
                return None
            raise
        return cast(Callable[..., Any], found)


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

    Without this, the kernels of the first graph are compiled one by one in this process: 4.6 of
    20.5 s for the Llama-3-8B shape (H200, torch 2.11, 2026-11-20). Returns at once. Does nothing
    where Inductor uses no processes.
    """
    maybe_warm_pool()
    AsyncCompile.use_process_pool()
