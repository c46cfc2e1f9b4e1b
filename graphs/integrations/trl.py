"""Rollouts of TRL's trainers by a session of the trained model itself.

trainer = GRPOTrainer(model, ..., rollout_func=rollout_func())
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from trl.data_utils import is_conversational

from graphs.integrations.batching import Asked, drawn_logprobs
from graphs.integrations.trained import TrainedModel, original_of

RolloutFunc = Callable[[Sequence[Any], Any], dict[str, list[Any]]]


def rollout_func(**options: Any) -> RolloutFunc:
    """A function for `rollout_func=` of `GRPOTrainer`: a completion of each prompt.

    It draws with the trainer's `generation_config`. Log-probabilities are those of what was drawn
    from, at the trainer's temperature and behind its filters.

    Args:
        options: of `TrainedModel`.
    """
    known: list[TrainedModel] = []  # of the trainer; one

    def roll_out(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        model = _whole_model(trainer)
        if not known or known[0].original is not original_of(model):
            known[:] = [TrainedModel(model, options)]
        return _roll_out(known[0], _prompt_ids(prompts, trainer), trainer.generation_config)

    return roll_out


@torch.no_grad()
def _roll_out(trained: TrainedModel, ids: list[list[int]], config: Any) -> dict[str, list[Any]]:
    asked = Asked.of(trained.original, config, None)
    wanted = asked.wanted | {"logprobs": 0}
    longest = asked.longest(ids, wanted)
    with trained.session(len(ids), longest, **asked.options) as session:
        results = session.generate(ids, **wanted)
    return {
        "prompt_ids": ids,
        "completion_ids": [result.token_ids for result in results],
        "logprobs": [drawn_logprobs(result) for result in results],
    }


def _whole_model(trainer: Any) -> torch.nn.Module:
    """The trained model; not where a process has a part of its weights."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("trainer must hold whole weights, got one with FSDP or DeepSpeed")
    if trainer.tools or trainer.environment_factories:
        raise ValueError(
            "trainer must have no tools and environments with a rollout_func of a session, as TRL "
            "goes on after a call of a tool by itself, without log-probabilities; supported: "
            "enable(model) and use_transformers_continuous_batching=True"
        )
    if getattr(trainer, "use_vllm", False):
        raise ValueError("use_vllm must be False with a rollout_func of a session, got True")
    return trainer.accelerator.unwrap_model(trainer.model_wrapped)


def _prompt_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Of texts, or of conversations by the trainer's chat template."""
    if not is_conversational({"prompt": prompts[0]}):
        return trainer.processing_class(text=list(prompts))["input_ids"]
    found = trainer.processing_class.apply_chat_template(
        list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return found["input_ids"]
