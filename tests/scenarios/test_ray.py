"""Rollouts by Ray: three actors, of which one dies. Needs the extra `ray`, which CI has not."""

import sys
from pathlib import Path

import pytest

from tests.kit.sessions import tokens_of

ray = pytest.importorskip("ray")

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [[1, *range(start, start + 20), last] for start in (5, 20, 30) for last in range(4)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_actor_dies_and_weights_change(monkeypatch):
    """No request is lost or counted twice; all tokens are of one version."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(EXAMPLES), str(EXAMPLES.parent), *sys.path]))
    import ray_rollouts

    model = ray_rollouts.small_model()
    options = {"max_batch_size": 8, "max_tokens": 128}
    alone = ray_rollouts.DecodeSession(model, **options)
    wanted = tokens_of(alone.generate(PROMPTS, 8, eos=()))
    weights = {name: value * 1.5 for name, value in model.state_dict().items()}
    ray.init(include_dashboard=False)
    try:
        pool = ray_rollouts.Pool(3, ray_rollouts.small_model, options)
        assert tokens_of(pool.generate(PROMPTS, 8, eos=())) == wanted
        ray.kill(pool._of(PROMPTS[0]))
        assert tokens_of(pool.generate(PROMPTS, 8, eos=())) == wanted
        assert len(pool.actors) == 2
        assert pool.update_weights(weights) == 1
        results = pool.generate(PROMPTS, 8, eos=())
    finally:
        ray.shutdown()
    alone.update_weights(weights)
    assert tokens_of(results) == tokens_of(alone.generate(PROMPTS, 8, eos=())) != wanted
    assert {one for result in results for one in result.weight_versions} == {1}
