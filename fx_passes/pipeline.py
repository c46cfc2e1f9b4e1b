"""The passes in order, and how they are put into Inductor's slot. This list is the whole pipeline:

device_constants dynamo   numbers are made on the device, not copied from the host
fast_prefill     dynamo   rows that no logits need are not computed
outline_layers   dynamo   equal layers become calls of one subgraph
share_products   aten     equal matrix products are computed once
short_products   aten     products of few terms are written as sums
collapse_views   aten     q, k, v reach attention as one view of their product
"""

import hashlib
from collections.abc import Callable
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from fx_passes.base import Pass, Stage
from fx_passes.config import PassConfig
from fx_passes.observe import PassRecord, graph_text, recorders, wants_texts
from fx_passes.passes.constants import DeviceConstants
from fx_passes.passes.fast_prefill import FastPrefill
from fx_passes.passes.layers import OutlineLayers
from fx_passes.passes.products import ShareProducts
from fx_passes.passes.short_products import ShortProducts
from fx_passes.passes.views import CollapseViews
from fx_passes.pictures.flowchart import before_and_after
from fx_passes.pictures.picture import chart_of

SLOT = "joint_custom_post_pass"
"""Inductor's slot for the `aten` stage.

It runs before Inductor looks into its cache, so passes run, and are counted, on a warm cache too;
the post-grad slots run only when the cache misses.
"""

_PIPELINE: list[type[Pass]] = [
    DeviceConstants, FastPrefill, OutlineLayers, ShareProducts, ShortProducts,
    CollapseViews,
]  # fmt: skip


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
    return [p.name for p in _PIPELINE]


def passes(config: PassConfig, stage: Stage) -> list[Pass]:
    """New instances of the stage's passes that `config` leaves on, in order."""
    return [
        p.of(config)
        for p in _PIPELINE
        if p.stage == stage and getattr(config, p.name, True) not in (False, "off")
    ]


def run_pass(one: Pass, graph: Graph, graph_name: str) -> int:
    """Run one pass and tell the active recorders."""
    wanted = wants_texts()
    before = graph_text(graph) if wanted else None
    chart = chart_of(graph) if wanted and one.stage == "dynamo" else None
    matches = one.run(graph)
    after = graph_text(graph) if wanted else None
    pictures = before_and_after(chart, chart_of(graph)) if chart and matches else None
    for recorder in recorders():
        record = PassRecord(one.name, one.stage, graph_name, matches, list(one.skipped))
        record.facts = dict(one.facts)
        if recorder.texts:
            record.before, record.after, record.pictures = before, after, pictures
        recorder.passes.append(record)
    return matches


class AtenPipeline(CustomGraphPass):
    """The `aten` stage as one custom pass of Inductor, behind what the user has put into the slot.

    Inductor calls it once for every graph, subgraphs included.
    """

    def __init__(
        self, config: PassConfig, user_pass: Callable[[Graph], None] | None = None
    ) -> None:
        self.config = config
        self.user_pass = user_pass
        self.num_graphs = 0

    def __call__(self, graph: Graph) -> None:
        if self.user_pass is not None:
            self.user_pass(graph)
        name = f"graph_{self.num_graphs}"
        self.num_graphs += 1
        for one in passes(self.config, "aten"):
            run_pass(one, graph, name)
        for recorder in recorders():
            recorder.final_graphs.append((name, graph_text(graph)))

    def uuid(self) -> Any | None:
        """Sources, settings and order of the passes, and the user's pass.

        None (no caching) if the user's pass has no key.
        """
        digest = hashlib.sha256()
        for one in passes(self.config, "aten"):
            digest.update(
                f"{one.name}\0{one.source()}\0{sorted(one.settings().items())}\0".encode()
            )
        if self.user_pass is None:
            return digest.hexdigest()
        theirs = self.user_pass.uuid() if isinstance(self.user_pass, CustomGraphPass) else None
        return None if theirs is None else (digest.hexdigest(), theirs)


def with_user_pass(config: PassConfig, user_pass: Any) -> AtenPipeline:
    """Our pipeline behind what stands in the slot already; a pipeline of ours there is replaced."""
    if isinstance(user_pass, list | tuple):  # torch 2.13 and later allow several
        chain = [p.user_pass if isinstance(p, AtenPipeline) else p for p in user_pass]
        chain = [p for p in chain if p is not None]
        return AtenPipeline(config, _Chain(chain) if chain else None)
    if isinstance(user_pass, AtenPipeline):
        return AtenPipeline(config, user_pass.user_pass)
    return AtenPipeline(config, user_pass)


class _Chain(CustomGraphPass):
    """Several passes of the user's, one after the other."""

    def __init__(self, chain: list[Callable[[Graph], None]]) -> None:
        self.chain = chain

    def __call__(self, graph: Graph) -> None:
        for one in self.chain:
            one(graph)

    def uuid(self) -> Any | None:
        ids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.chain]
        return None if None in ids else tuple(ids)


def run_dynamo_stage(gm: GraphModule, config: PassConfig) -> None:
    """The passes on the Dynamo graph, in place."""
    for one in passes(config, "dynamo"):
        if run_pass(one, gm.graph, "main"):
            gm.recompile()
