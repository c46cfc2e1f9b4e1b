"""A session's function of logits: what tokens are drawn from, called and captured."""

import pytest
import torch

from tests.kit.models import build_model
from tests.kit.sessions import captured, make_session

PROMPTS = [[5, 9, 3], [7] * 20, [1]]


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


def no_repeats(logits, state):
    """Never the last token again, and only even tokens at even positions; it writes in place."""
    logits = logits.scatter_(1, state["tokens"][:, None], -torch.inf)
    even = torch.arange(logits.shape[1], device=logits.device) % 2 == 0
    wanted = (state["positions"] % 2 == 0)[:, None]
    return torch.where(wanted == even, logits, -torch.inf)


@torch.no_grad()
def alone(model, prompt, number):
    """Tokens, and the model's log-probabilities of them."""
    model.set_attn_implementation("eager")
    tokens, logprobs = list(prompt), []
    try:
        for _ in range(number):
            row = model(torch.tensor([tokens])).logits[:, -1].float()
            state = {"positions": torch.tensor([len(tokens)]), "tokens": torch.tensor(tokens[-1:])}
            token = int(no_repeats(row.clone(), state).argmax())
            logprobs.append(row.log_softmax(-1)[0, token].item())
            tokens.append(token)
    finally:
        model.set_attn_implementation("attn_ops")
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("make", [make_session, captured])
@pytest.mark.parametrize("decode_steps", [1, 8])
@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_drawn_from_it(model, make, decode_steps, drafts):
    session = make(
        model, logits_function=no_repeats, decode_steps=decode_steps, num_draft_tokens=drafts,
        max_tokens_per_step=16,
    )  # fmt: skip
    wanted = [alone(model, prompt, 12) for prompt in PROMPTS]
    results = session.generate(PROMPTS, 12, logprobs=0)
    for result, (tokens, logprobs) in zip(results, wanted, strict=True):
        assert result.token_ids == tokens
        found = [row[t].logprob for row, t in zip(result.logprobs, tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=1e-5)
    if drafts:
        requests = [session.add(prompt, 12) for prompt in PROMPTS]
        while session.num_unfinished:
            known = {i: len(session.book.requests[i].token_ids) for i in requests}
            session.verify_draft({i: wanted[k][0][known[i] : known[i] + 3]
                                  for k, i in enumerate(requests)})  # fmt: skip
        assert [session.result(i).token_ids for i in requests] == [t for t, _ in wanted]


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="logits_function must be callable or None, got 3"):
        make_session(model, logits_function=3)
    session = make_session(model, logits_function=lambda logits, state: logits[:, :5])
    with pytest.raises(ValueError, match=r"logits_function must return logits \[1, 64\]"):
        session.generate(PROMPTS[:1], 4)
