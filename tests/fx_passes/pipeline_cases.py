"""Passes and a function to compile, for tests of the pipeline."""

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fx_passes import attn_ops, pipeline
from fx_passes.base import Pass

CLASSES = [one for one in pipeline.pass_classes() if one.__module__.startswith("fx_passes.")]
ASKED = ("fast_prefill",)
"""Off by default."""
ATEN = [one.name for one in CLASSES if one.stage == "aten" and one.name not in ASKED]
aten = torch.ops.aten


class Counting(Pass):
    """Counts sines and changes nothing."""

    name = "counting"
    stage = "aten"
    setting = 1

    def apply(self, graph):
        return len(graph.find_nodes(op="call_function", target=aten.sin.default))

    def settings(self):
        return {"setting": self.setting}


class UserPass(CustomGraphPass):
    """A user's pass that notes what it saw, and has a key or none."""

    def __init__(self, key: str | None = "mine") -> None:
        self.key, self.seen = key, []

    def __call__(self, graph) -> None:
        self.seen.append(
            (
                len(graph.find_nodes(op="call_function", target=aten.mm.default)),
                inductor_config.max_fusion_size,
            )
        )

    def uuid(self):
        return self.key


def twice(x, w):
    """Two equal products that differ to Inductor's own CSE at trace time only in their views."""
    return (x.view(-1, 8) @ w).sin() + (x.view(-1, 8) @ w).cos()


X, W = torch.linspace(-1, 1, 24).view(3, 8), torch.eye(8) * 3


def compiled(function=twice, **arguments):
    arguments.setdefault("backend", attn_ops)
    if arguments["backend"] == "inductor":  # a hit in AOTAutograd's cache would run no pass at all
        with functorch_config.patch(enable_autograd_cache=False):
            return _compiled(function, arguments)
    return _compiled(function, arguments)


def _compiled(function, arguments):
    got = torch.compile(lambda x, w: function(x, w), fullgraph=True, **arguments)(X, W)
    torch.testing.assert_close(got, function(X, W))
