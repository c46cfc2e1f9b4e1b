"""The passes in order. This list is the whole pipeline:

device_constants dynamo   numbers are made on the device, not copied from the host
fast_prefill     dynamo   rows that no logits need are not computed
outline_layers   dynamo   equal layers become calls of one subgraph
share_products   aten     equal matrix products are computed once
short_products   aten     products of few terms are written as sums
quantize_output  aten     attention that is quantized writes FP8 itself
collapse_views   aten     q, k, v reach attention as one view of their product
experts          aten     a mixture of experts becomes one operator
router           aten     a router's softmax, choice and weights become one operator
skinny_products  aten     products go to an operator that is faster for few rows
fused_mlp        aten     norm, gated products and additions become one operator
norm_products    aten     a product of an RMSNorm becomes one operator
"""

import copy
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule

from fx_passes.base import Pass, Stage, check_pass
from fx_passes.config import PassConfig
from fx_passes.failures import named_errors
from fx_passes.installed import installed_passes
from fx_passes.naming import GraphName, name_of
from fx_passes.observe import recorders
from fx_passes.passes.constants import DeviceConstants
from fx_passes.passes.experts import Experts
from fx_passes.passes.fast_prefill import FastPrefill
from fx_passes.passes.fused_mlp import FusedMlp
from fx_passes.passes.layers import OutlineLayers
from fx_passes.passes.norm_products import NormProducts
from fx_passes.passes.products import ShareProducts
from fx_passes.passes.quantize_output import QuantizeOutput
from fx_passes.passes.routers import Router
from fx_passes.passes.short_products import ShortProducts
from fx_passes.passes.skinny_products import SkinnyProducts
from fx_passes.passes.views import CollapseViews
from fx_passes.promises import Promises

_PIPELINE: list[type[Pass]] = [
    DeviceConstants, FastPrefill, OutlineLayers, ShareProducts, ShortProducts,
    QuantizeOutput, CollapseViews, Experts, Router, SkinnyProducts, FusedMlp,
    NormProducts,
]  # fmt: skip
"""Global: it is the registry of passes."""


def register_pass(new: type[Pass], *, before: str | None = None, after: str | None = None) -> None:
    """Insert a third party's pass before or after the one named.

    Without a name its place is what the pass declares, `runs_before` or `runs_after`, or the end.

    Raises:
        TypeError: it is no class of `Pass`, or is abstract.
        ValueError: the name is taken or none, the stage is unknown, both or an unknown anchor are
            given.
    """
    check_pass(new)
    pass_classes()  # those of installed packages come first
    _insert(new, before, after)


def _insert(new: type[Pass], before: str | None, after: str | None) -> None:
    names = [one.name for one in _PIPELINE]
    if before is None and after is None:
        before, after = new.runs_before, new.runs_after
    if new.name in names:
        raise ValueError(f"pass name must be new, got {new.name!r}; taken: {', '.join(names)}")
    if before is not None and after is not None:
        raise ValueError(
            f"at most one of before and after must be given, got {before!r} and {after!r}"
        )
    anchor = before if before is not None else after
    if anchor is not None and anchor not in names:
        raise ValueError(
            f"before and after must name a pass, got {anchor!r}; supported: {', '.join(names)}"
        )
    index = len(names) if anchor is None else names.index(anchor) + (after is not None)
    _PIPELINE.insert(index, new)


def unregister_pass(name: str) -> None:
    """Take a pass out of the pipeline.

    Raises:
        ValueError: there is none of that name.
    """
    names = pass_names()
    if name not in names:
        raise ValueError(f"name must be a pass, got {name!r}; supported: {', '.join(names)}")
    del _PIPELINE[names.index(name)]


def pass_names() -> list[str]:
    """Names of all passes, in order."""
    return [p.name for p in pass_classes()]


def pass_classes() -> list[type[Pass]]:
    """All passes, in order; registered and installed ones too."""
    installed = installed_passes()
    while installed.waiting:
        errors = {}  # a name is taken, or a place unknown until another one is inserted
        for new in installed.waiting:
            try:
                _insert(new, None, None)
            except ValueError as error:
                errors[new] = error
        if len(errors) == len(installed.waiting):
            for new, error in errors.items():
                installed.leave_out(new.name, error)
            errors = {}
        installed.waiting = list(errors)
    return list(_PIPELINE)


def broken_passes() -> dict[str, str]:
    """By name, installed passes that are left out, and why."""
    pass_classes()
    return dict(installed_passes().broken)


def passes(config: PassConfig, stage: Stage) -> list[Pass]:
    """New instances of the stage's passes that `config` leaves on, in order."""
    classes = [p for p in pass_classes() if p.stage == stage and config.is_on(p.switch or p.name)]
    return [_made(p, config) for p in classes]


def _made(one: type[Pass], config: PassConfig) -> Pass:
    with named_errors(one.name):
        made: Any = one.of(config)
        if not isinstance(made, Pass):
            raise TypeError(f"of must return a Pass, got {made!r}")
        return made


def is_checked(config: PassConfig) -> bool:
    """Whether the `Promises` of passes are checked; tests put another function here."""
    return config.check_passes


def run_pass(one: Pass, graph: Graph, name: GraphName, config: PassConfig) -> int:
    """Run one pass and tell the active recorders.

    Raises:
        PassError: the pass raised, returned what it must not, or broke one of the `Promises`.
        RefusedError: its option asks for what cannot be done.
    """
    active = recorders()
    dumps = [recorder.directory for recorder in active if recorder.directory is not None]
    with named_errors(one.name, name.text, dumps):
        notes = [recorder.watch(one, graph, name) for recorder in active]
        promises = Promises(graph, one.stage) if is_checked(config) else None
        try:
            matches = one.run(graph)
            if matches and promises is not None:
                promises.check(graph)
        except Exception as error:
            for note in notes:
                note(0, error)
            raise
        for note in notes:
            note(matches)
        return matches


def run_dynamo_stage(gm: GraphModule, config: PassConfig) -> Callable[[], None]:
    """The passes on the Dynamo graph, in place. If one fails, the graph is what it was.

    Returns what makes it that again, for errors of what follows.
    """
    graph, name = copy.deepcopy(gm.graph), name_of(gm.graph)
    submodules = set(gm._modules)

    def undo() -> None:
        for added in set(gm._modules) - submodules:
            gm.delete_submodule(added)
        gm.graph = graph

    try:
        for one in passes(config, "dynamo"):
            if run_pass(one, gm.graph, name, config):
                gm.recompile()
    except BaseException:
        undo()
        raise
    return undo
