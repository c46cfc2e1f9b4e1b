"""Log-probabilities of drawn and of given tokens, beside all else that a request asks for."""

import pytest
import torch

from tests.fuzz import options
from tests.fuzz.__main__ import parser
from tests.kit.marks import long, slow
from tests.kit.models import build_model
from tests.kit.sessions import captured, make_session

PROMPTS = [[5, 9, 3], list(range(20)), [60], [7] * 9]


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


def log_softmax(model, tokens: list[int]) -> torch.Tensor:
    """[T, V] of Transformers' logits."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    finally:
        model.set_attn_implementation("attn_ops")


@pytest.fixture(scope="module")
def run_mix():
    return options.search(parser().parse_args(["options", "--device", "cpu"]))


@pytest.mark.parametrize("seeds", [range(12), *slow(range(12, 60)), *long(range(60, 400))])
def test_random_mixes(run_mix, seeds):
    for seed in seeds:
        run_mix(seed)


def test_a_wrong_log_probability_is_found(run_mix, monkeypatch):
    from graphs.sampling import logprobs

    right = logprobs.reference_log_probs

    def wrong(*arguments):
        found = right(*arguments)
        return found[0] + 1e-4, *found[1:]

    monkeypatch.setattr(logprobs, "reference_log_probs", wrong)
    with pytest.raises(AssertionError):
        list(map(run_mix, range(8)))


def test_of_processed_logits(model):
    """After penalties, filters and temperature they are those of what is drawn from."""
    session = captured(model, logprobs_mode="processed_logprobs")
    sampling = {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.3, "seed": 3}
    for prompt in PROMPTS:
        (result,) = session.generate([prompt], 6, logprobs=4, **sampling)
        raw = log_softmax(model, prompt + result.token_ids)
        for number, found in enumerate(result.logprobs):
            seen = sorted(set(prompt + result.token_ids[:number]))
            row = raw[len(prompt) + number - 1].clone()
            row[seen] = torch.where(row[seen] < 0, row[seen] * 1.3, row[seen] / 1.3)
            assert len(found) == 4
            values = torch.tensor([one.logprob for one in found.values()])
            assert values.exp().sum() == pytest.approx(1, abs=1e-5)


def test_none_is_computed_where_nobody_asks(model):
    session = captured(model)
    (result,) = session.generate(PROMPTS[:1], 4)
    assert result.logprobs is result.prompt_logprobs is result.cumulative_logprob is None
    assert all(step.key.logprobs == -1 for step in session.graphs)


def test_cumulative(model):
    (result,) = make_session(model).generate(PROMPTS[1:2], 8, logprobs=0)
    raw = log_softmax(model, PROMPTS[1] + result.token_ids)
    wanted = sum(raw[19 + i, token].item() for i, token in enumerate(result.token_ids))
    assert result.cumulative_logprob == pytest.approx(wanted, abs=1e-5)
    assert [list(found) for found in result.logprobs] == [[t] for t in result.token_ids]


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_scored", [None, 3])
@pytest.mark.parametrize("shares", [False, True])
def test_scores(model, shares, max_scored):
    session = make_session(model, share_prefixes=shares, max_tokens_per_step=8)
    if max_scored is not None:
        session.scheduler.max_scored = max_scored
    running = session.add(PROMPTS[0], 12)
    session.step()
    rests = [[1, 2], [3] * 7, [4], [9, 8, 7]]
    scores = session.score(PROMPTS, rests, logprobs=2, token_ids=[3, 63])
    for prompt, rest, score in zip(PROMPTS, rests, scores, strict=True):
        raw = log_softmax(model, prompt + rest)[len(prompt) - 1 : -1]
        assert score.token_ids == rest
        wanted = raw.gather(1, torch.tensor(rest)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, rtol=0, atol=1e-5)
        assert score.is_argmax == (raw.argmax(1) == torch.tensor(rest)).tolist()
        others = torch.tensor(score.of_token_ids)
        torch.testing.assert_close(others, raw[:, [3, 63]], rtol=0, atol=1e-5)
        best = [next(t for t in found if found[t].rank == 1) for found in score.top_logprobs]
        assert best == raw.argmax(1).tolist()
        assert score.total == pytest.approx(wanted.sum().item(), abs=1e-4)
    while session.num_unfinished:
        session.step()
    assert session.result(running) == make_session(model).generate(PROMPTS[:1], 12)[0]


def test_whole_prompts(model):
    session = make_session(model)
    for prompt, score in zip(PROMPTS[:2], session.score(PROMPTS[:2]), strict=True):
        raw = log_softmax(model, prompt)[:-1]
        wanted = raw.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, rtol=0, atol=1e-5)


def test_scores_are_equal_where_all_of_them_is(model):
    session = make_session(model)
    (plain,), (again,) = session.score([[3, 4]]), session.score([[3, 4]])
    (other,) = session.score([[3, 4]], token_ids=[7])
    assert plain == again
    assert plain != other


def test_answers_to_one_question_compute_it_once(model):
    session = make_session(model, share_prefixes=True, max_batch_size=4)
    question = list(range(48))
    session.score([question] * 4, [[1], [2], [3, 4], [5]])
    counts = session.scheduler.prefixes.counts()
    assert counts.num_shared_tokens >= 3 * 32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.score([[1]]), "prompts must hold a token to score"),
        (lambda s: s.score([[1, 2]], [[]]), "continuations must hold a token to score"),
        (lambda s: s.score([[1]], [torch.tensor([]).long()]), "^continuations must hold a token"),
        (lambda s: s.score([[1]], [[2], [3]]), "continuations must be 1, one a prompt, got 2"),
        (lambda s: s.score([[1]], [[99999]]), "continuations must hold token ids from 0"),
        (lambda s: s.score([[1, 2]], logprobs=-1), "logprobs must be an integer from 0"),
        (lambda s: s.score([[1, 2]], token_ids=[-1]), "token_ids must hold token ids from 0"),
        (lambda s: s.score([[]]), "prompt must hold at least one token"),
    ],
)
def test_refused(model, call, message):
    session = make_session(model)
    with pytest.raises(ValueError, match=message):
        call(session)
    assert not session._requests


@pytest.mark.parametrize("fast_prefill", [*slow("on"), *long("off")])
def test_compiled(fast_prefill):
    """One graph serves steps that score any number of rows."""
    torch._dynamo.reset()
    model = build_model("llama")
    compiled = torch.compile(
        model, backend="attn_ops", fullgraph=True, options={"fast_prefill": fast_prefill}
    )
    session = make_session(compiled, max_tokens_per_step=16)
    rests = [[1, 2], [3] * 7, [4], [9, 8, 7]]
    plain = session.generate(PROMPTS, 4)
    found = session.score(PROMPTS, rests)
    assert session.generate(PROMPTS, 4, logprobs=3, prompt_logprobs=2, min_tokens=2) == plain
    for prompt, rest, score in zip(PROMPTS, rests, found, strict=True):
        raw = log_softmax(model, prompt + rest)[len(prompt) - 1 : -1]
        wanted = raw.gather(1, torch.tensor(rest)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, rtol=0, atol=1e-5)
    report = session.report()
    assert (report.num_graphs, report.num_breaks, report.num_recompiles) == (1, 0, 0)
