"""Captured sessions whose memory sleeps, whose weights change, and that draw by a function."""

import copy

import pytest
import torch

from tests.graphs.test_logits_function import alone, no_repeats
from tests.graphs.test_update_weights import changed
from tests.kit.models import build_model
from tests.kit.sessions import make_session, waits

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 3], [7] * 20, [1]]


@pytest.fixture(scope="module")
def model():
    return build_model("llama").cuda()


def test_graphs_are_valid_after_sleeping(model):
    wanted = make_session(model).generate(PROMPTS, 12)
    session = make_session(model, can_sleep=True, cache_tokens=2**20)
    assert session.generate(PROMPTS, 12) == wanted
    graphs, before = session.graphs, session.num_steps["captured"]
    for _ in range(50):
        awake = torch.cuda.mem_get_info()[0]
        session.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 0.9 * session.cache.num_bytes
        session.wake()
        assert session.generate(PROMPTS, 12) == wanted
    assert session.graphs is graphs
    assert session.num_steps["captured"] > before


@pytest.mark.parametrize("merge", [False, True])
def test_updated_weights_are_in_the_graphs(model, merge):
    session = make_session(copy.deepcopy(model), merge_projections=merge)
    session.generate(PROMPTS, 8)
    for seed in range(3):
        other = changed(model, seed)
        session.update_weights(other.state_dict())
        found = session.generate(PROMPTS, 8)
        assert found == make_session(other).generate(PROMPTS, 8)
    assert session.num_steps["captured"] > 0


def test_a_function_of_logits_is_captured(model):
    session = make_session(model, logits_function=no_repeats, decode_steps=4)
    results = session.generate(PROMPTS, 12)
    on_cpu = copy.deepcopy(model).cpu()
    assert [r.token_ids for r in results] == [alone(on_cpu, p, 12)[0] for p in PROMPTS]
    assert session.num_steps["captured"] > 0


def test_prompts_of_embeddings(model):
    session = make_session(model)
    rows = [
        {"inputs_embeds": model.get_input_embeddings()(torch.tensor([p], device="cuda"))}
        for p in PROMPTS
    ]
    assert session.generate(rows, 12) == make_session(model).generate(PROMPTS, 12)
    assert session.num_steps["captured"] > 0


def test_what_a_changed_model_has_computed_is_dropped(model):
    """It is refused beside a replay where the device was idle, and merged adapters are in place."""
    own = copy.deepcopy(model)
    session, wanted = make_session(own), make_session(model).generate(PROMPTS, 8)
    assert session.generate(PROMPTS, 8) == wanted
    requests = [session.add(prompt, 8) for prompt in PROMPTS]
    weight = own.model.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.data.normal_()
    own.model.layers[1].train()
    waits(session, "training must be False")
    own.eval()
    weight.data.copy_(kept)
    while session.num_unfinished:
        session.step()
    assert [session.result(number) for number in requests] == wanted
    session.add(PROMPTS[0], 8)
    data, weight.data = weight.data, weight.data.clone()
    with pytest.raises(ValueError, match="up_proj"):
        session.step()
    weight.data = data
    assert session.generate(PROMPTS, 8) == wanted
