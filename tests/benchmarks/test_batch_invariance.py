"""benchmarks.batch_invariance: what it draws, scores and counts, on a CPU without the option."""

import torch

from benchmarks.batch_invariance import differing, drawn, random_way, requests, rows_of
from tests.kit.models import build_model
from tests.kit.sessions import make_session


def test_drafts_and_steps_draw_the_same_tokens():
    """In float64 log-probabilities differ by rounding alone, and drafts change no token."""
    model = build_model("llama", dtype=torch.float64, max_position_embeddings=1200)
    prompts = [[t % 64 for t in prompt] for prompt in requests(5, 64)]
    sizes = {"max_tokens": 1200, "max_batch_size": 3}
    want = drawn(make_session(model, **sizes), prompts, 6, range(5))
    session = make_session(model, num_draft_tokens=3, **sizes)
    got = drawn(session, prompts, 6, range(5), want)
    assert differing(got, want)[1:] == (0, 30)
    for (_, values), (_, wanted) in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(wanted))


def test_differences_are_counted():
    want = [([1, 2], [-0.5, -0.25]), ([3], [-1.0])]
    got = [([1, 2], [-0.5, -0.2500001]), ([4], [-1.0])]
    assert differing(got, want) == (1, 1, 3)
    assert rows_of({"one": {"called": (1, 1, 3000)}}) == {"called": {"one": "1 of 3,000"}}


def test_random_ways_are_options_of_a_session():
    import random

    model = build_model("llama", max_position_embeddings=128)
    for seed in range(4):
        asked = random_way(random.Random(seed)) | {"cudagraph_mode": "NONE"}
        make_session(model, **asked)
