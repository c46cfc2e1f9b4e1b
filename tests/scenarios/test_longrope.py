"""Longrope: requests on both sides of the original context, in one batch, as `generate` alone."""

import pytest
import torch

import fx_passes
from graphs import DecodeSession
from tests.kit.models import build_model, generated
from tests.kit.sessions import drain

ORIGINAL = 32
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
LONGEST = [(7 * i * i + 3) % 64 for i in range(60)]
PROMPTS = [LONGEST[:5], LONGEST[:20], LONGEST[:33], LONGEST[:32], LONGEST, [9]]
NEW = [12, 13, 12, 1, 12, 12]  # the second and the fourth just fit


def build():
    sizes = {"max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL}
    return build_model("phi3", rope_parameters=dict(ROPE), **sizes)


def by_itself(model) -> list[list[int]]:
    """Of as many tokens as are asked for."""
    pairs = zip(PROMPTS, NEW, strict=True)
    return [generated(model, p, n, "sdpa", min_new_tokens=n, do_sample=False) for p, n in pairs]


def make_session(model, **options) -> DecodeSession:
    sizes = {"max_batch_size": 4, "max_tokens": 80, "max_tokens_per_step": 16, "block_size": 4}
    return DecodeSession(model, **(sizes | options))


def decoded(session: DecodeSession) -> list[list[int]]:
    ids = [session.add(p, n) for p, n in zip(PROMPTS, NEW, strict=True)]
    streamed = drain(session)
    return [streamed[request] for request in ids]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode_steps": 3, "share_prefixes": True},
        {"cache_tokens": 100},
        pytest.param({"compiled": True}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_requests_on_both_sides(options):
    """Prompts share prefixes across the boundary, and some are preempted where blocks are few."""
    model = build()
    wanted = by_itself(build())
    options = dict(options)
    run = model
    if options.pop("compiled", False):
        run = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = make_session(run, **options)
    assert decoded(session) == wanted
    if run is not model:
        assert session.counters.num_recompiles == 0
    assert decoded(session) == wanted
    assert by_itself(model) == wanted, "its own generate stays what it was"


def test_drafts_beyond_the_context_change_nothing():
    """Those of a request that ends at the original context, beside one that is far from it."""
    model, wanted = build(), by_itself(build())
    session = make_session(model, num_draft_tokens=4)
    ids = {session.add(PROMPTS[i], NEW[i]): wanted[i] for i in (1, 0)}
    streamed = dict.fromkeys(ids, 0)
    while session.num_unfinished:
        drafts = {i: [*tokens[streamed[i] :][:3], 1] for i, tokens in ids.items()}
        for output in session.verify_draft(drafts):
            streamed[output.request_id] += 1
    assert [session.result(i).token_ids for i in ids] == list(ids.values())


def test_prefixes_are_found():
    """Although every forward writes the frequencies, which are buffers."""
    session = make_session(build(), share_prefixes=True)
    first = session.generate([PROMPTS[1]], 2)
    assert session.generate([PROMPTS[1]], 2) == first
    assert session.report().prefixes.num_shared_tokens >= 16


def test_requests_that_cross_are_refused():
    session = make_session(build())
    with pytest.raises(ValueError, match="max_new_tokens must be at most 13 for a prompt of 20"):
        session.add(PROMPTS[1], 14)
    assert session.num_unfinished == 0
