"""A causal model type, built small with random weights, and the greedy tokens of Transformers."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.model_type_composites import classes
from benchmarks.model_type_configs import RESERVED, VOCAB, small_config

PROMPT_LENGTHS = (5, 20, 33)
NEW_TOKENS = 12

SCALE = 1.2
"""Standard deviation of a weight's elements, times the root of its inputs."""


@dataclasses.dataclass
class Generated:
    """Greedy tokens, a list a prompt, and the logits [tokens, V] they were chosen from."""

    model: Any
    tokens: list[list[int]]
    logits: list[torch.Tensor]
    cached: bool  # not by a loop without a cache


def make_prompts() -> list[list[int]]:
    draw, known = random.Random(0), [t for t in range(VOCAB) if t not in RESERVED]
    return [draw.choices(known, k=length) for length in PROMPT_LENGTHS]


def built(model_type: str, attn_implementation: str, window: int) -> Any:
    """A model from a fresh config, which building one changes."""
    import transformers

    config = small_config(model_type, window)
    model_class = getattr(transformers, classes()[model_type])
    if model_class.config_class is type(config.get_text_config()):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attn_implementation)
    model.generation_config = transformers.GenerationConfig(  # its own may stop or penalize
        bos_token_id=1, decoder_start_token_id=1
    )
    return model.float().eval().requires_grad_(False)


def make_reference(model_type: str, prompts: Sequence[Sequence[int]], window: int) -> Generated:
    """Eager attention, one prompt at a time; by hand where `generate` fails."""
    model = built(model_type, "eager", window)
    randomize(model)
    try:
        return generated(model, prompts)
    except Exception:
        return by_hand(model, prompts)


def randomize(model: torch.nn.Module) -> None:
    """Weights so large that greedy outputs vary and attention matters, biases that are not 0.

    What is no random weight (decays, scales of norms) stays. No reserved token is ever the best.
    """
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and weight.abs().mean() > 2 * weight.mean().abs():
            weight.data.normal_(0, SCALE * weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias") and not weight.any():
            weight.data.normal_(0, 0.1, generator=generator)
    head = model.get_output_embeddings()
    for part in head if isinstance(head, torch.nn.ModuleList) else [head]:
        for weight in part.parameters() if part is not None else ():
            if weight.shape[0] == VOCAB:
                weight.data[list(RESERVED)] = 0


def generated(model: Any, prompts: Sequence[Sequence[int]]) -> Generated:
    """By `generate`, with the cache that the type has."""
    tokens, logits = [], []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(out.logits).float())
    return Generated(model, tokens, logits, cached=True)


@torch.no_grad()
def by_hand(model: Any, prompts: Sequence[Sequence[int]]) -> Generated:
    """Without `generate` and without a cache."""
    tokens, logits = [], []
    for prompt in prompts:
        ids, rows = torch.tensor([list(prompt)]), []
        for _ in range(NEW_TOKENS):
            out = model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
            rows.append(out.logits[:, -1].float())
            ids = torch.cat([ids, rows[-1].argmax(-1, keepdim=True)], dim=1)
        tokens.append(ids[0, len(prompt) :].tolist())
        logits.append(torch.cat(rows))
    return Generated(model, tokens, logits, cached=False)
