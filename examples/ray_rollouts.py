"""Rollouts on several GPUs or machines by Ray: an actor each, with a session of its own.

`pip install 'attn-ops[transformers,ray]'`, then `python examples/ray_rollouts.py` here, or on a
cluster of Ray.

A prompt goes to the actor that its first tokens choose, so that prompts which begin alike find each
other's prefix in one cache. New weights are put into Ray's store once and reach every actor under
one version, between two of its steps. If an actor dies, the others take its requests: a request is
done when its result has arrived, so none is lost and none counts twice.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from graphs import AsyncSession, DecodeSession, Generation

PREFIX = 16
"""Tokens that choose the actor."""


class Worker:
    """A session. Ray calls its methods in several threads; one thread steps the session."""

    def __init__(self, make_model: Callable[[], torch.nn.Module], options: dict[str, Any]) -> None:
        self.opened = AsyncSession(DecodeSession(make_model(), share_prefixes=True, **options))

    def generate(self, prompt: list[int], max_new_tokens: int, asked: dict[str, Any]) -> Generation:
        return self.opened.submit(prompt, max_new_tokens, **asked).result()

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> int:
        """The version from here on; requests that run go on with the new weights."""

        def update(session: DecodeSession) -> int:
            session.update_weights(weights)
            return session.weight_version

        return self.opened.call(update)


class Pool:
    """Actors that answer prompts.

    Args:
        number: of actors; each takes `num_gpus` of the cluster.
        make_model: returns the model, on the device of its actor, compiled or not.
        options: of each `DecodeSession`.
    """

    def __init__(
        self,
        number: int,
        make_model: Callable[[], torch.nn.Module],
        options: dict[str, Any],
        num_gpus: float = 0,
    ) -> None:
        kind = ray.remote(Worker).options(num_gpus=num_gpus, num_cpus=0, max_concurrency=256)
        self.actors = [kind.remote(make_model, options) for _ in range(number)]

    def generate(
        self, prompts: Sequence[list[int]], max_new_tokens: int, **asked: Any
    ) -> list[Generation]:
        """In the order of the prompts, on whatever actors live."""
        results: dict[int, Generation] = {}
        while len(results) < len(prompts):
            if not self.actors:
                raise RuntimeError("every actor has died")
            sent = {}
            for i, prompt in enumerate(prompts):
                if i not in results:
                    actor = self._of(prompt)
                    sent[actor.generate.remote(prompt, max_new_tokens, asked)] = i, actor
            for ref, (i, actor) in sent.items():
                try:
                    results[i] = ray.get(ref)
                except RayActorError:  # its other requests run again, too, elsewhere
                    self.actors = [one for one in self.actors if one is not actor]
        return [results[i] for i in range(len(prompts))]

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Their version, which all actors that live have now."""
        stored = ray.put(dict(weights))
        sent = [(actor, actor.update_weights.remote(stored)) for actor in self.actors]
        versions = set()
        for actor, ref in sent:
            try:
                versions.add(ray.get(ref))
            except RayActorError:
                self.actors = [one for one in self.actors if one is not actor]
        if len(versions) != 1:
            raise RuntimeError(f"actors that live must have one version, got {sorted(versions)}")
        return versions.pop()

    def _of(self, prompt: list[int]) -> Any:
        """That with the highest number for the prefix: if one dies, the others keep theirs."""

        def number(actor: Any) -> bytes:
            return hashlib.sha256(f"{actor._actor_id}{prompt[:PREFIX]}".encode()).digest()

        return max(self.actors, key=number)


def small_model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from attn_ops.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    if not torch.cuda.is_available():
        return model.eval()
    return torch.compile(model.cuda().eval(), backend="attn_ops", fullgraph=True)  # type: ignore


def main() -> None:
    ray.init(include_dashboard=False)
    pool = Pool(3, small_model, {"max_batch_size": 8, "max_tokens": 128})
    prompts = [[1, *range(start, start + 20), last] for start in (5, 20, 30) for last in range(4)]
    first = pool.generate(prompts, 8, eos=())
    print(f"{len(first)} results of {len(pool.actors)} actors")
    ray.kill(pool.actors[0])
    again = pool.generate(prompts, 8, eos=())
    same = [r.token_ids for r in first] == [r.token_ids for r in again]
    print(f"{len(again)} results of {len(pool.actors)} actors; the same tokens: {same}")
    weights = getattr(small_model(), "_orig_mod", small_model()).state_dict()
    version = pool.update_weights({name: value * 1.5 for name, value in weights.items()})
    results = pool.generate(prompts, 8, eos=())
    versions = {one for result in results for one in result.weight_versions}
    print(f"new weights, version {version}: tokens of the versions {versions}")
    ray.shutdown()


if __name__ == "__main__":
    main()
