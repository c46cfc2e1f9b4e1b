"""What fast_prefill leaves to torch: views of no rows with their sizes written, no symbols."""

import pytest
import torch

import fx_passes
from fx_passes.passes.fast_prefill import _inferred
from tests.fx_passes.passes.fast_prefill_models import (
    Batches,
    Plain,
    compare,
    compiled,
    eager_backend,
    seeded,
)

SHAPES = {
    "sizes": ("view", (1, 5, -1, 4), {}, (1, 5, 3, 4)),
    "tuple": ("reshape", ((1, 5, -1, 4),), {}, ((1, 5, 3, 4),)),
    "function": (torch.reshape, ((1, 5, -1, 4),), {}, ((1, 5, 3, 4),)),
    "keyword": ("view", (), {"size": (1, 5, -1, 4)}, {"size": (1, 5, 3, 4)}),
    "function's keyword": (torch.reshape, (), {"shape": [1, 5, -1, 4]}, {"shape": (1, 5, 3, 4)}),
    "no -1": ("view", (1, 5, 3, 4), {}, (1, 5, 3, 4)),
    "a dtype": ("view", (torch.int32,), {}, (torch.int32,)),
    "expand": ("expand", (1, 5, -1, 4), {}, (1, 5, -1, 4)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_sizes_that_no_rows_would_leave_open_are_written_out(case):
    """-1 of `view` and `reshape` only; of `expand` it means another thing."""
    target, arguments, keywords, wanted = SHAPES[case]
    graph = torch.fx.Graph()
    x, call = graph.placeholder("x"), graph.call_method if isinstance(target, str) else None
    node = (call or graph.call_function)(target, (x, *arguments), keywords)
    node.meta["example_value"] = torch.empty(1, 5, 3, 4)
    got, named = _inferred(node)
    assert got[0] is x
    assert (named if keywords else got[1:]) == wanted


def test_sizes_by_a_node_are_left_alone():
    graph = torch.fx.Graph()
    x, shape = graph.placeholder("x"), graph.placeholder("shape")
    node = graph.call_method("view", (x,), {"size": shape})
    node.meta["example_value"] = torch.empty(1, 5, 3, 4)
    assert _inferred(node) == ((x,), {"size": shape})


@pytest.mark.slow
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_numbers_read_from_tensors():
    """`item()` in a forward is a symbol that torch looks for afterwards; the analysis, which runs
    the node again, leaves none of its own behind.
    """

    class Scaled(Plain):
        def run(self, h, kv_caches, batch):
            return super().run(h * self.place.weight.abs().amax().item(), kv_caches, batch)

    model = seeded(Scaled())
    for backend in (eager_backend(), fx_passes.attn_ops):
        torch._dynamo.reset()
        options = {} if backend is not fx_passes.attn_ops else {"options": {"fast_prefill": "on"}}
        fast = compiled(model, backend=backend, **options)
        compare(model, fast, Batches(model).step("mixed"), exact=False)
