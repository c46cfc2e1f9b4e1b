"""The passes of stage `aten` as one custom pass of Inductor, and the slot that it goes to."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fx_passes.config import PassConfig
from fx_passes.failures import named_errors
from fx_passes.naming import GraphName, name_of
from fx_passes.observe import recorders
from fx_passes.ordered import check_ordered, order_norms
from fx_passes.pipeline import passes, run_pass

SLOT = "joint_custom_post_pass"
"""Inductor's slot for the `aten` stage.

It runs before Inductor looks into its cache, so passes run, and are counted, on a warm cache too.
The post-grad slots run only when the cache misses.
"""


class AtenPipeline(CustomGraphPass):
    """The `aten` stage as one custom pass of Inductor. It runs after a pass of the user's.

    Inductor calls it once for every graph, subgraphs included.

    Args:
        config: which passes run.
        user_pass: what the slot held.
        name: of the graph, if it is a piece of the model; None: by what it computes.
        nonce: further part of the key; see `fx_passes.kept.Keeper`.
    """

    def __init__(
        self,
        config: PassConfig,
        user_pass: Callable[[Graph], None] | None = None,
        name: GraphName | None = None,
        nonce: str = "",
    ) -> None:
        self.config = config
        self.user_pass = user_pass
        self.name = name
        self.nonce = nonce

    def named(self, name: GraphName | None, nonce: str = "") -> "AtenPipeline":
        """The same for a piece of the model."""
        return AtenPipeline(self.config, self.user_pass, name, nonce)

    def __call__(self, graph: Graph) -> None:
        if self.user_pass is not None:
            self.user_pass(graph)
        name = self.name or name_of(graph)
        for one in passes(self.config, "aten"):
            run_pass(one, graph, name, self.config)
        if self.config.batch_invariant:
            order_norms(graph)
            check_ordered(graph, name.text)
        for recorder in recorders():
            recorder.finish(graph, name)

    def uuid(self) -> Any | None:
        """Sources, settings and order of the passes, and the user's pass.

        None (no caching) if the user's pass has no key.
        """
        key = f"{self.nonce}{self.config.batch_invariant}{_own_source()}"
        digest = hashlib.sha256(key.encode())
        for one in passes(self.config, "aten"):
            with named_errors(one.name):
                settings = sorted(one.settings().items())
                key = f"{one.name}\0{one.source()}\0{settings}\0{one.token_range}\0"
                digest.update(key.encode())
        if self.user_pass is None:
            return digest.hexdigest()
        theirs = self.user_pass.uuid() if isinstance(self.user_pass, CustomGraphPass) else None
        return None if theirs is None else (digest.hexdigest(), theirs)


# Cached: files of a running process do not change.
@functools.cache
def _own_source() -> str:
    """Digest of the package's files: what a pass does also stands in modules that it imports."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def with_user_pass(config: PassConfig, user_pass: Any) -> AtenPipeline:
    """Our pipeline, after what the slot holds already. A pipeline of ours in it is replaced."""
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
