"""The passes in order. This list is the whole pipeline:

device_constants dynamo   numbers are made on the device, not copied from the host
fast_prefill     dynamo   rows that no logits need are not computed
outline_layers   dynamo   equal layers become calls of one subgraph
share_products   aten     equal matrix products are computed once
short_products   aten     products of few terms are written as sums
collapse_views   aten     q, k, v reach attention as one view of their product
"""

from torch.fx import Graph, GraphModule

from fx_passes.base import Pass, Stage
from fx_passes.config import PassConfig
from fx_passes.observe import recorders
from fx_passes.passes.constants import DeviceConstants
from fx_passes.passes.fast_prefill import FastPrefill
from fx_passes.passes.layers import OutlineLayers
from fx_passes.passes.products import ShareProducts
from fx_passes.passes.short_products import ShortProducts
from fx_passes.passes.views import CollapseViews

_PIPELINE: list[type[Pass]] = [
    DeviceConstants, FastPrefill, OutlineLayers, ShareProducts, ShortProducts,
    CollapseViews,
]  # fmt: skip
"""Global: it is the registry of passes."""


def register_pass(new: type[Pass], *, before: str | None = None, after: str | None = None) -> None:
    """Insert a third party's pass before or after the one named, or at the end.

    Raises:
        ValueError: the name is taken, both or an unknown anchor are given.
    """
    names = pass_names()
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
    if name not in pass_names():
        raise ValueError(f"name must be a pass, got {name!r}; supported: {', '.join(pass_names())}")
    del _PIPELINE[pass_names().index(name)]


def pass_names() -> list[str]:
    """Names of all passes, in order."""
    return [p.name for p in _PIPELINE]


def pass_classes() -> list[type[Pass]]:
    """All passes, in order; registered ones too."""
    return list(_PIPELINE)


def passes(config: PassConfig, stage: Stage) -> list[Pass]:
    """New instances of the stage's passes that `config` leaves on, in order."""
    return [p.of(config) for p in _PIPELINE if p.stage == stage and config.is_on(p.name)]


def run_pass(one: Pass, graph: Graph, graph_name: str) -> int:
    """Run one pass and tell the active recorders."""
    notes = [recorder.watch(one, graph, graph_name) for recorder in recorders()]
    matches = one.run(graph)
    for note in notes:
        note(matches)
    return matches


def run_dynamo_stage(gm: GraphModule, config: PassConfig) -> None:
    """The passes on the Dynamo graph, in place."""
    for one in passes(config, "dynamo"):
        if run_pass(one, gm.graph, "main"):
            gm.recompile()
