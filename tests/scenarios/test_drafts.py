"""Drafts: the same tokens, within the positions of the model and the token budget."""

import random

import pytest

from tests.kit.sessions import PROMPTS, captured_lazily, drafted, drain, tokens_of, uncaptured

SHORT = {
    "gpt2": {},  # its positions are rows of a table
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}


def short_model(make_model, kind):
    if kind != "gpt2":
        return make_model(max_position_embeddings=32, rope_parameters=SHORT[kind])
    transformers = pytest.importorskip("transformers")
    make_model()  # registers attention
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("options", [{}, {"debug": None, "cudagraph_mode": "NONE"}])
def test_drafts_stay_within_the_positions_of_the_model(make_model, kind, options):
    model = short_model(make_model, kind)
    prompts = [[1, 2, 3], [5] * 10, [9] * 28]
    want = uncaptured(model, max_tokens=32).generate(prompts, 100)
    session = captured_lazily(model, max_tokens=32, num_draft_tokens=3, **options)
    ids = [session.add(p, 100) for p in prompts]
    while session.num_unfinished:
        session.verify_draft({})
    assert [session.result(i) for i in ids] == want


def test_finished_requests_do_not_block_drafts(model):
    session = captured_lazily(model, num_draft_tokens=2)
    done = session.add([1, 2], 1, repetition_penalty=1.5)
    drain(session)
    request = session.add([3, 4], 6)
    while session.num_unfinished:
        session.verify_draft({done: [1, 2], request: [5]})
    assert session.result(request) == uncaptured(model).generate([[3, 4]], 6)[0]


@pytest.mark.parametrize("budget", [3, 4, 9])
def test_drafts_keep_to_the_token_budget(model, budget, monkeypatch):
    session = captured_lazily(model, num_draft_tokens=3, max_tokens_per_step=budget)
    ids, fill, sizes = [session.add(p, 9) for p in PROMPTS], session.runner.fill, []

    def watched(tensors, step, kind, **late):
        sizes.append(sum(s.num_tokens for s in step))
        fill(tensors, step, kind, **late)

    monkeypatch.setattr(session.runner, "fill", watched)
    while session.num_unfinished:
        session.verify_draft({})
    assert max(sizes) <= budget
    assert [session.result(i) for i in ids] == uncaptured(model).generate(PROMPTS, 9)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("debug", [None, "eager_replay"])
def test_drafts_change_nothing(model, sampling, debug):
    """Right, partly right and wrong drafts; near the end of a request too."""
    want = uncaptured(model).generate(PROMPTS, 13, **sampling)
    mode = "FULL_DECODE_ONLY" if debug else "NONE"
    session = captured_lazily(model, debug=debug, cudagraph_mode=mode, num_draft_tokens=3)
    generator = random.Random(1)

    def propose(following):
        draft = following[:3]
        wrong = [(t + 1) % 64 for t in draft]
        return generator.choice([draft, draft[:1], wrong, []])

    results, num_steps = drafted(session, PROMPTS, tokens_of(want), propose, **sampling)
    assert results == want
    assert num_steps < 11
    with pytest.raises(ValueError, match="num_draft_tokens"):
        uncaptured(model).verify_draft({})
