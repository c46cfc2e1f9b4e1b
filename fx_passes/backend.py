"""`torch.compile(model, backend="attn_ops")`: our passes, then Inductor.

Dynamo graph --run_dynamo_stage--> --compile_regions--> AOTAutograd --AtenPipeline--> Inductor
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from attn_ops.compat.inductor_until_2_13 import inductor_mended
from attn_ops.compat.stride_order_until_2_16 import strides_ordered_without_guards
from fx_passes.calls import config_of_calls, counted
from fx_passes.config import PassConfig
from fx_passes.early_launch import early_launch_of
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
    given = inductor_options.get(SLOT)
    if isinstance(given, AtenPipeline) and given.config != config:
        raise ValueError(
            "options must name passes themselves with backend='attn_ops', got those of "
            f"fx_passes.options({given.config}), which are for plain Inductor"
        )
    config, of_replays = config_of_calls(config, example_inputs)
    patches = {**of_replays, **_mode_options(mode), **inductor_options}
    pipeline = with_user_pass(config, patches.get(SLOT, getattr(inductor_config, SLOT)))
    early = early_launch_of(config, patches, example_inputs)
    patches |= early.patches
    if config.batch_invariant:  # else Inductor times orders of sums, and rounds where it likes
        known = ("deterministic", "batch_invariant", "emulate_precision_casts")
        patches |= {name: True for name in known if hasattr(inductor_config, name)}
    for recorder in recorders():
        recorder.num_graphs += 1
        recorder.early_launch = early.why
    undo = run_dynamo_stage(gm, config)

    keeper = next((r.keeper for r in recorders() if r.keeper is not None), None)
    pieces: list[Callable[..., Any]] = []

    def compile_piece(
        piece: GraphModule, inputs: Sequence[Any], name: GraphName | None
    ) -> Callable[..., Any]:
        own = pipeline.named(name, f"{'' if keeper is None else keeper.nonce}{early}")
        compiled = compile_fx(piece, inputs, config_patches={**patches, SLOT: own})
        pieces.append(cast(Callable[..., Any], compiled))
        return pieces[-1]

    with (
        autograd_cache(keeper),
        inductor_mended(),
        strides_ordered_without_guards(),
        early.compiling(),
        _without_advice(),
    ):
        try:
            compiled = compile_regions(gm, example_inputs, compile_piece)
            if keeper is not None:
                keeper.keep(gm, pieces, whole=compiled in pieces)
            called = early.called(compiled)
            return counted(called) if config.batch_invariant else called
        except BaseException:
            undo()  # whose graph it is may compile it by other means
            raise


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Torch does not warn of float32 products, as of RoPE's angles, which have a good reason."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise ValueError(
            f"mode must be known to Inductor, got {mode!r}; supported: default, {', '.join(known)}"
        )
    return dict(known[mode])


_BACKEND_ALONE = {
    "fast_prefill": ("on",),  # works on the Dynamo graph
    "early_launch": ("on", "off"),  # is decided around the compilation and around each call
}


def options(config: PassConfig | None = None) -> dict[str, Any]:
    """Options for plain Inductor: `torch.compile(model, options=fx_passes.options())`.

    They run our `aten` passes. Passes on the Dynamo graph (`outline_layers`, and `fast_prefill`
    where "auto" allows it) need the backend; Inductor has no slot for them.

    Raises:
        ValueError: `config` asks for what the backend alone can do.
    """
    for name, values in _BACKEND_ALONE.items():
        if (value := getattr(config, name, None)) in values:
            raise ValueError(
                f"options[{name!r}] must not be {value!r} under plain Inductor; "
                "supported with backend='attn_ops'"
            )
    return {SLOT: with_user_pass(config or PassConfig(), getattr(inductor_config, SLOT))}


def start_compile_workers() -> None:
    """Start Inductor's compile processes, so that they are ready when Dynamo has traced the model.

    Without this, the kernels of the first graph are compiled one by one in this process: 4.6 of
    20.5 s for the Llama-3-8B shape (H200, torch 2.11, 2026-11-20). Returns at once. Does nothing
    where Inductor uses no processes.
    """
    maybe_warm_pool()
    AsyncCompile.use_process_pool()
