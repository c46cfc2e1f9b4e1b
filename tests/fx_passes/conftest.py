"""Graphs to run passes on: ATen graphs with symbolic row counts, and Dynamo's own."""

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from fx_passes import pipeline
from fx_passes.base import Pass
from fx_passes.observe import graph_text
from tests.fx_passes.pipeline_cases import CLASSES


class AtenGraph:
    """The functional ATen graph of a function as AOTAutograd hands it on.

    Dimension 0 of the first argument is symbolic.

    Calling it takes the function's own arguments.
    """

    def __init__(self, function: Callable, *args: torch.Tensor) -> None:
        first = args[0].clone()
        torch._dynamo.mark_dynamic(first, 0)

        def keep(gm: GraphModule, example_inputs: list) -> Callable:
            self.gm = gm

            def remember_order(*inputs: torch.Tensor | int) -> object:
                places = {t.data_ptr(): i for i, t in enumerate([first, *args[1:]])}
                self.order = [
                    places[t.data_ptr()] if isinstance(t, torch.Tensor) else None for t in inputs
                ]
                return gm.forward(*inputs)

            return remember_order

        compiled = torch.compile(
            lambda *a: function(*a), backend=aot_autograd(fw_compiler=keep), fullgraph=True
        )
        compiled(first, *args[1:])
        self.graph = self.gm.graph
        self.graph.eliminate_dead_code()
        self.recompile()

    def recompile(self) -> None:
        self.gm.recompile()

    def __call__(self, *args: torch.Tensor) -> object:
        return self.gm(
            *(args[0].shape[0] if place is None else args[place] for place in self.order)
        )


@pytest.fixture(scope="session")
def aten_graph() -> type[AtenGraph]:
    return AtenGraph


@pytest.fixture(scope="session")
def dynamo_run() -> Callable[..., tuple[GraphModule, object]]:
    """Compile a module with one pass and AOTAutograd: the rewritten Dynamo graph and the result."""

    def run(module: Callable, one: Pass, *args: torch.Tensor) -> tuple[GraphModule, object]:
        from torch._dynamo.backends.registry import lookup_backend

        graphs = []

        def backend(gm: GraphModule, example_inputs: list) -> Callable:
            one.matches = one.run(gm.graph)
            gm.recompile()
            graphs.append(gm)
            return lookup_backend("aot_eager")(gm, example_inputs)

        result = torch.compile(module, backend=backend, fullgraph=True)(*args)
        return graphs[
            -1
        ], result  # a restart of Dynamo (floats that become inputs) leaves one behind

    return run


@pytest.fixture(scope="session")
def contract() -> Callable[..., tuple[str, str]]:
    """Print, apply, print, apply again: nothing new, the same numbers. Returns both texts.

    Numbers are equal bit by bit, unless the pass promises less and its test says how much.
    """

    def check(
        one: Pass,
        gm: AtenGraph | GraphModule,
        *args: torch.Tensor,
        matches: int,
        tolerance: float = 0.0,
    ) -> tuple[str, str]:
        wanted = gm(*args)
        before = graph_text(gm.graph)
        assert one.run(gm.graph) == matches
        gm.graph.lint()
        gm.recompile()
        after = graph_text(gm.graph)
        assert bool(matches) == (after != before), "a changed graph has matches"
        torch.testing.assert_close(gm(*args), wanted, atol=tolerance, rtol=tolerance)
        assert one.run(gm.graph) == 0
        gm.recompile()
        assert graph_text(gm.graph) == after
        return before, after

    return check


@pytest.fixture
def own_pipeline(monkeypatch):
    """What a test registers is gone after it; passes of installed packages are left out."""
    monkeypatch.setattr(pipeline, "_PIPELINE", list(CLASSES))
