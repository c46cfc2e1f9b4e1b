"""Records of passes: counts, texts, nodes, summaries and Inductor's code."""

import pytest
import torch

from fx_passes import Recorder, recording, register_pass
from fx_passes.base import Pass
from tests.fx_passes.pipeline_cases import Counting, compiled

pytestmark = pytest.mark.usefixtures("own_pipeline")


def test_recorder_counts_and_nests():
    register_pass(Counting)
    with recording() as outer:
        compiled()
        torch._dynamo.reset()
        with recording() as inner:
            compiled()
    compiled()
    assert (outer.num_graphs, inner.num_graphs) == (2, 1)
    assert (outer.matches()["counting"], inner.matches()["counting"]) == (2, 1), (
        "also when Inductor's cache is warm"
    )
    assert (outer.matches()["share_products"], inner.matches()["share_products"]) == (2, 1)
    assert inner.passes == outer.passes[len(inner.passes) :]
    assert [name for name, _ in inner.final_graphs] == ["whole graph"]
    assert inner.final_graphs[0][1].count("aten.mm.default(") == 1
    assert all(r.before is None and r.after is None for r in outer.passes)


def test_a_recorder_describes_what_changes():
    """Graphs before and after a pass that matched."""

    class Doubling(Pass):
        """Adds nothing twice."""

        name, stage = "doubling", "dynamo"

        def apply(self, graph):
            return 1

    def describe(graph, made):
        return [{"name": node.name} for node in graph.nodes]

    register_pass(Doubling)
    with recording(Recorder(describe=describe)) as recorder:
        compiled()
    described = {one.pass_name: one.nodes for one in recorder.passes if one.nodes}
    assert set(described) == {"doubling", "share_products"}
    assert described["doubling"][0] == described["doubling"][1]
    assert described["share_products"][0] != described["share_products"][1]


def test_summaries_are_the_passes_own():
    class Telling(Counting):
        name = "telling"

        def summary(self):
            return f"{self.facts.get('sines', 0)} sines"

        def apply(self, graph):
            self.facts["sines"] = super().apply(graph)
            return 0

    register_pass(Telling)
    with recording() as recorder:
        compiled()
        torch._dynamo.reset()
        compiled()
    assert recorder.summaries() == {"telling": "1 sines"}


def test_recorder_output_code():
    with recording() as recorder:
        compiled()
    assert len(recorder.output_code) == 1
    assert "def call" in recorder.output_code[0]
