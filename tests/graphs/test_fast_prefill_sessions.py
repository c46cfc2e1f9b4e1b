"""Sessions with fast_prefill: the same tokens, one graph, no recompilation."""

import pytest
import torch

import fx_passes
from fx_passes import PassConfig, recording
from fx_passes.pipeline import run_dynamo_stage
from graphs import DecodeSession

PROMPTS = [[3], [5, 9], list(range(1, 40)), [1, 2, 3, 4], [7] * 9]
MODES = {
    "called": {"cudagraph_mode": "NONE"},
    "decode": {"cudagraph_mode": "FULL_DECODE_ONLY", "debug": "eager_replay"},
    "full": {
        "cudagraph_mode": "FULL",
        "debug": "eager_replay",
        "mixed_capture_sizes": [16],
        "verify": "always",
    },
}


def eager(gm, example_inputs):
    """Our passes on the Dynamo graph, and no compiler behind them."""
    run_dynamo_stage(gm, PassConfig(fast_prefill="on", outline_layers=False))
    return gm.forward


def session_of(model, **options):
    """Prompts longer than a step are computed in chunks."""
    sizes = {"max_batch_size": 4, "max_tokens": 64, "max_tokens_per_step": 16, "backend": "TORCH"}
    return DecodeSession(model, **(sizes | options))


def tokens(session):
    return [r.token_ids for r in session.generate(PROMPTS, 8)]


def matches(recorder):
    return [p.matches > 0 for p in recorder.passes if p.pass_name == "fast_prefill"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3n", "gemma4"])
def test_sessions_generate_the_same(make_model, num_graphs, name):
    """One compiled model in all modes; tied, Gemma would repeat its last token."""
    model = make_model(name, tie_word_embeddings=False)
    wanted = tokens(session_of(model))
    assert len({token for row in wanted for token in row}) > 5
    before = num_graphs()
    fast = torch.compile(model, backend=eager, fullgraph=True)
    with recording() as recorder:
        for mode in MODES.values():
            session = session_of(fast, **mode)
            assert tokens(session) == wanted
            assert session.counters.num_recompiles == 0
    assert matches(recorder) == [True]
    assert num_graphs() - before == 1


def test_sessions_by_inductor(make_model, num_graphs):
    model = make_model()
    wanted = tokens(session_of(model))
    before = num_graphs()
    fast = torch.compile(
        model, backend=fx_passes.attn_ops, fullgraph=True, options={"fast_prefill": "on"}
    )
    with recording() as recorder:
        for mode in ("called", "full"):
            session = session_of(fast, **MODES[mode])
            assert tokens(session) == wanted
            assert session.counters.num_recompiles == 0
    assert matches(recorder) == [True]
    assert num_graphs() - before == 1


def test_auto_leaves_other_sessions_alone(make_model):
    """Off is the default, and runs nothing."""
    with recording() as recorder:
        tokens(session_of(torch.compile(make_model(), backend=fx_passes.attn_ops, fullgraph=True)))
    assert matches(recorder) == []
