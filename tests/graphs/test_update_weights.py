"""Weights that are written between steps: graphs stay, and tokens are those of the new weights."""

import copy
import pickle

import pytest
import torch

from tests.kit.models import build_model
from tests.kit.sessions import captured, is_empty, make_session

PROMPTS = [[5, 9, 3], [7] * 20, [1]]


def changed(model, seed=1, scale=0.05):
    """A model of other weights."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * scale)
    return other


@pytest.mark.parametrize("make", [make_session, captured])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_tokens_are_those_of_a_new_session(make, merge, name):
    model = build_model(name)
    others = [changed(model, seed) for seed in range(3)]
    options = {"share_prefixes": True} | ({"merge_projections": True} if merge else {})
    session = make(copy.deepcopy(model), **options)
    before = session.generate(PROMPTS, 8)
    for number, other in enumerate(others, 1):
        session.update_weights(other.state_dict())
        results = session.generate(PROMPTS, 8)
        wanted = make_session(copy.deepcopy(other)).generate(PROMPTS, 8)
        assert [r.token_ids for r in results] == [w.token_ids for w in wanted]
        assert results != before
        assert session.weight_version == number
        assert all(r.weight_versions == [number] * 8 for r in results)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_running_requests_say_which_weights_drew_their_tokens(decode_steps):
    model = build_model("llama")
    other = changed(model, scale=0.5)
    session = captured(copy.deepcopy(model), decode_steps=decode_steps)
    requests = [session.add(prompt, 24) for prompt in PROMPTS]
    known = dict.fromkeys(requests, 0)
    while min(known.values()) < 8:
        for output in session.step():
            known[output.request_id] += 1
    session.update_weights(iter(other.state_dict().items()))
    at = {i: len(session.book.requests[i].token_ids) for i in requests}
    while session.num_unfinished:
        session.step()
    plain = make_session(copy.deepcopy(model)).generate(PROMPTS, 24)
    for request, alone in zip(requests, plain, strict=True):
        result = session.result(request)
        assert result.weight_versions == [0] * at[request] + [1] * (24 - at[request])
        assert 8 <= at[request] < 24
        assert result.token_ids[: at[request]] == alone.token_ids[: at[request]]
        loaded = pickle.loads(pickle.dumps(result))
        assert loaded.weight_versions == result.weight_versions
    found = [session.result(request).token_ids for request in requests]
    assert found != [result.token_ids for result in plain]


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    model = build_model("llama")
    session = make_session(model)
    wanted = session.generate(PROMPTS, 8)
    weights = changed(model).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    for wrong, message in (
        ({"model.layers.0.self_attn.q_proj.weigh": weights[name]}, f"may mean '{name}'"),
        ({name: weights[name].double()}, f"weight {name} must be torch.float32"),
        ({name: weights[name][:-1]}, f"weight {name} must be torch.float32"),
        ({name: 3}, "got int"),
        ({name: weights[name].to("meta")}, "must hold numbers as the model's does"),
        ({name: weights[name].to_sparse()}, "must hold numbers as the model's does"),
    ):
        with pytest.raises(ValueError, match=message):
            session.update_weights(weights | wrong if name in wrong else {**weights, **wrong})
    assert session.generate(PROMPTS, 8) == wanted
    assert session.weight_version == 0


def test_200_updates_leave_nothing():
    model = build_model("llama")
    pair = [model.state_dict(), changed(model).state_dict()]
    pair[0] = {name: tensor.clone() for name, tensor in pair[0].items()}
    session = captured(model, share_prefixes=True)
    wanted = []
    for number in range(200):
        session.update_weights(pair[number % 2])
        found = session.generate(PROMPTS, 2)
        wanted.append(found)
        assert found == wanted[number % 2]
    assert is_empty(session)
    assert wanted[0] != wanted[1]
