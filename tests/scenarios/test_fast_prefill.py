"""Sessions with fast_prefill: the same tokens, one graph, no recompilation."""

import pytest
import torch

import fx_passes
from fx_passes import PassConfig, recording
from fx_passes.pipeline import run_dynamo_stage
from tests.kit.marks import long, slow
from tests.kit.sessions import chunked, tokens_of

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
    "piecewise": {
        "cudagraph_mode": "PIECEWISE",
        "debug": "eager_replay",
        "mixed_capture_sizes": [16],
        "verify": "always",
    },
}


def eager(gm, example_inputs):
    """Our passes on the Dynamo graph, and no compiler behind them."""
    run_dynamo_stage(gm, PassConfig(fast_prefill="on", outline_layers=False))
    return gm.forward


def matches(recorder):
    return [p.matches > 0 for p in recorder.passes if p.pass_name == "fast_prefill"]


@pytest.mark.parametrize("name", ["llama", *slow("gemma4"), *long("qwen3", "gemma3n")])
def test_sessions_generate_the_same(make_model, num_graphs, name):
    """One compiled model in all modes; tied, Gemma would repeat its last token."""
    model = make_model(name, tie_word_embeddings=False)
    wanted = tokens_of(chunked(model).generate(PROMPTS, 8))
    assert len({token for row in wanted for token in row}) > 5
    before = num_graphs()
    fast = torch.compile(model, backend=eager, fullgraph=True)
    with recording() as recorder:
        for mode in MODES.values():
            session = chunked(fast, **mode)
            assert tokens_of(session.generate(PROMPTS, 8)) == wanted
            assert session.counters.num_recompiles == 0
        check_chunks_without_logits(model, fast)
    assert matches(recorder) == [True]
    assert num_graphs() - before == 1


def check_chunks_without_logits(model, fast):
    """Three chunks of 16 tokens want none, the fourth wants one: behind the last cache write the
    model sees no row. Replays are compared with calls.
    """
    prompts, sizes = [list(range(1, 56))], []
    wanted = tokens_of(chunked(model).generate(prompts, 8))
    session = chunked(fast, **MODES["called"])
    with session.observe_logits(lambda step, logits_RV: sizes.append(logits_RV.shape[0])):
        assert tokens_of(session.generate(prompts, 8)) == wanted
    assert sizes == [1] * 8, "one of the last chunk, seven of decodes"
    for mode in ("full", "piecewise"):
        session = chunked(fast, **MODES[mode])
        assert tokens_of(session.generate(prompts, 8)) == wanted
        (graph,) = (one for one in session.graphs or () if not one.key.logits)
        assert (graph.key.num_tokens, graph.num_replays) == (16, 3)
        assert "chunks of 16 tokens, 5 requests, no logits" in str(session.report())


@pytest.mark.slow
def test_sessions_by_inductor(make_model, num_graphs):
    """The graph that was compiled for some rows runs for none: chunks of prompts."""
    model, prompts = make_model(), [*PROMPTS, list(range(1, 56))]
    wanted = tokens_of(chunked(model).generate(prompts, 8))
    before = num_graphs()
    fast = torch.compile(
        model, backend=fx_passes.attn_ops, fullgraph=True, options={"fast_prefill": "on"}
    )
    with recording() as recorder:
        for mode in ("called", "full"):
            session = chunked(fast, **MODES[mode])
            assert tokens_of(session.generate(prompts, 8)) == wanted
            assert session.counters.num_recompiles == 0
    session, prompts = chunked(fast, **MODES["full"]), prompts[-1:]
    assert tokens_of(session.generate(prompts, 8)) == wanted[-1:]
    assert [one.num_replays for one in session.graphs or () if not one.key.logits] == [3]
    assert matches(recorder) == [True]
    assert num_graphs() - before == 1


@pytest.mark.parametrize("size", [1, 16])
def test_mixed_steps_of_one_token_are_recorded(make_model, size):
    """Their padding is one row of one request, and no logits row."""
    model = make_model()
    wanted = tokens_of(chunked(model).generate(PROMPTS, 8))
    fast = torch.compile(model, backend=eager, fullgraph=True)
    more = {"mixed_capture_sizes": sorted({1, size}), "max_tokens_per_step": size}
    session = chunked(fast, **(MODES["piecewise"] | more))
    assert tokens_of(session.generate(PROMPTS, 8)) == wanted
    assert session.num_steps["called"] == 0


@pytest.mark.slow
def test_a_model_that_needs_rows_gets_one_a_request(make_model, caplog):
    """The session says so; tokens are the same."""
    model = make_model()

    def needs_rows(module, arguments, logits):
        return logits + 0 * logits.amax(dim=1, keepdim=True)  # of no rows there is none

    model.lm_head.register_forward_hook(needs_rows)
    prompts = [list(range(1, 56))]
    wanted = tokens_of(chunked(model).generate(prompts, 8))
    fast = torch.compile(model, backend=eager)
    session = chunked(fast, **MODES["full"])
    assert tokens_of(session.generate(prompts, 8)) == wanted
    assert all(one.key.logits for one in session.graphs or ())
    assert "chunks of prompts compute a row of logits a request" in caplog.text
    report = " ".join(str(session.report()).split())
    assert "chunks of prompts compute a row of logits a request" in report


def test_other_models_compute_all_logits(make_model):
    """Without the pass a chunk costs its lm_head a row, and no second graph."""
    session = chunked(make_model(), **MODES["full"])
    session.generate([list(range(1, 56))], 2)
    assert all(one.key.logits for one in session.graphs or ())
