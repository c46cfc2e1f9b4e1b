"""Passes that declare a range of token counts: when they run, and why not."""

import sys

import pytest
import torch

from attn_ops import attention
from fx_passes import Pass, attn_ops, recording, register_pass
from fx_passes.pipeline import PassConfig, passes

pytestmark = pytest.mark.usefixtures("own_pipeline")


class Ranged(Pass):
    """Matches once, in batches of a range."""

    name, stage = "ranged", "aten"
    token_range = range(2, 9)

    def apply(self, graph):
        return 1


def ranged(**attributes) -> type[Pass]:
    return type("Other", (Ranged,), attributes)


def reason_of(call, *given, **how) -> str | None:
    """Why the pass did nothing in the graph that is compiled; None if it matched."""
    with recording() as recorder:
        torch.compile(lambda *args: call(*args), backend=attn_ops, **how)(*given)
    (one,) = (record for record in recorder.passes if record.pass_name == "ranged")
    assert one.matches == (not one.reasons)
    return one.reasons[0] if one.reasons else None


@pytest.fixture(params=["dynamo", "aten"])
def stage(request):
    return request.param


@pytest.fixture
def attend(make_batch):
    """Attention over a batch of 6 tokens, and its q."""
    made = make_batch([3, 1, 2], [9, 5, 2])
    return lambda q: attention(q, made.kv_cache, made.meta, 0.5), made.q


@pytest.mark.parametrize(
    ("counts", "bounds", "reason"),
    [
        (range(2, 9), None, None),
        (range(6, 7), None, None),
        (range(7, 9), None, "the graph is for 6 tokens, not only for 7 to 8"),
        (range(2, 6), None, "the graph is for 6 tokens, not only for 2 to 5"),
        (range(2, 9), {}, "the graph is for 2 or more tokens, not only for 2 to 8"),
        (range(2, sys.maxsize), {}, None),
        (range(2, 9), {"min": 3, "max": 8}, None),
        (range(4, 9), {"min": 3, "max": 8}, "the graph is for 3 to 8 tokens, not only for 4 to 8"),
    ],
)
def test_numbers_of_tokens(attend, stage, counts, bounds, reason):
    """One number, any, or those within bounds."""
    function, q = attend
    if bounds is not None:
        torch._dynamo.mark_dynamic(q, 0, **bounds)
    register_pass(ranged(stage=stage, token_range=counts))
    assert reason_of(function, q, dynamic=False if bounds is None else None) == reason


def test_a_session_s_graph_is_for_all_counts(attend, as_dynamic):
    """One token and none are not told apart there."""
    function, q = attend
    torch._dynamo.mark_dynamic(q, 0)
    register_pass(ranged(token_range=range(2, sys.maxsize)))
    with as_dynamic():
        reason = reason_of(function, q)
    assert reason == "the graph is for 0 or more tokens, not only for 2 or more"


def test_no_attention_tells_the_number():
    register_pass(ranged(stage="dynamo"))
    reason = "no attention in the graph tells the number of tokens"
    assert reason_of(torch.sin, torch.ones(4)) == reason


def test_layers_that_are_cut_out(make_batch):
    """A pass behind `outline_layers` sees the attention of the layers."""
    made = make_batch([3, 1, 2], [9, 5, 2])

    class Layer(torch.nn.Module):
        def forward(self, q):
            return attention(q, made.kv_cache, made.meta, 0.5)

    register_pass(ranged(stage="dynamo"), after="outline_layers")
    assert reason_of(torch.nn.Sequential(Layer(), Layer()), made.q, dynamic=False) is None


def test_options_may_set_it():
    class Set(Ranged):
        @classmethod
        def of(cls, config):
            made = cls()
            made.token_range = cls.told
            return made

    Set.told = range(3)
    register_pass(Set)
    assert passes(PassConfig(), "aten")[-1].token_range == range(3)


def test_it_is_part_of_the_cache_s_key(monkeypatch):
    from fx_passes.inductor_slot import AtenPipeline

    register_pass(Ranged)
    key = AtenPipeline(PassConfig()).uuid()
    monkeypatch.setattr(Ranged, "token_range", range(5))
    assert AtenPipeline(PassConfig()).uuid() != key
